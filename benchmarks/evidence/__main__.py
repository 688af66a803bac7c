"""`make bench`: measures, part by part, what the folder of results lacks, and writes docs/benchmarks.md.

An interrupted run is continued by the next one. docs/papers.md is written by `python -m benchmarks.evidence.papers`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence.document import write_document
from benchmarks.evidence.parts import PARTS, Sweep
from benchmarks.evidence.plan import FULL, SHORT
from benchmarks.evidence.results import Results
from benchmarks.load.server import ROOT


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    results = Results(args.results)
    args.docs.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(SHORT if args.short else FULL, results, args.docs)
    for name in [] if args.write_only else args.only:
        if args.again:
            results.drop(name)
        start = time.monotonic()
        print(f"--- {name}, about {PARTS[name].minutes:g} minutes", flush=True)
        PARTS[name].run(sweep)
        print(f"--- {name}: {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    write_document(results, args.docs)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=ROOT / "bench-results", help="folder of results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of benchmarks.md")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="parts to run")
    parser.add_argument("--again", action="store_true", help="measure them even if there are results")
    parser.add_argument("--short", action="store_true", help="few edits: only shows that it works")
    parser.add_argument("--write-only", action="store_true", help="only write the document, from the results there are")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
