"""`make bench`: runs what the folder of results lacks, part by part, and writes docs/benchmarks.md with its plots.

Broken off, it goes on where it was. `--only PART ..` runs these alone, `--again` measures them anew.
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
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of benchmarks.md and its plots")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="these parts")
    parser.add_argument("--again", action="store_true", help="measure them even where there are results")
    parser.add_argument("--short", action="store_true", help="few edits each: to see that it works, not to measure")
    parser.add_argument("--write-only", action="store_true", help="write the document from what there is")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
