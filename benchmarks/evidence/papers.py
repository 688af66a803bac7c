"""`python -m benchmarks.evidence.papers`: docs/papers.md, published figures beside ours.

Prose is in papers.md, what papers claim in claims/, and ours in files of results: those of docs/results, and the
sections of docs/gpu_results, named `card/section`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.evidence.markdown import fill
from benchmarks.load.server import ROOT

HERE = Path(__file__).parent
PAGE, CLAIMS = HERE / "papers.md", HERE / "claims"
MISSING = "**missing**"

Record = dict[str, Any]


def render(docs: Path) -> str:
    """The page. docs: the folder with the results. Raises FileNotFoundError or KeyError for a claim's figure that no
    result has."""
    values: Record = {path.stem: [_row(claim, docs) for claim in _read(path)] for path in sorted(CLAIMS.glob("*.json"))}
    return fill(PAGE.read_text(), values | {"results": list(_results(docs))})


def _row(claim: Record, docs: Path) -> Record:
    """A claim with our figure beside it."""
    if not claim["result"]:
        return claim | {"kind": MISSING, "source": ""}
    result = find(claim["result"], docs)
    source = claim["result"].replace("/", ", ")
    return claim | {"ours": claim["ours"].format_map(result["figures"]), "kind": result["kind"], "source": source}


def find(name: str, docs: Path) -> Record:
    """A result: kind, command, machine, commit (of a card's run the day), figures."""
    card, _, section = name.partition("/")
    if not section:
        found: Record = _read(docs / "results" / f"{name}.json")
        return found
    gpu = _read(docs / "gpu_results" / f"{card}.json")
    return {
        "kind": "measured",
        "command": "make gpu-run",
        "machine": gpu["about"]["device"],
        "commit": gpu["about"]["day"],
        "figures": gpu["sections"][section],
    }


def _results(docs: Path) -> Iterator[Record]:
    used = {claim["result"] for path in CLAIMS.glob("*.json") for claim in _read(path)} - {""}
    for name in sorted(used):
        yield find(name, docs) | {"name": name.replace("/", ", ")}


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def write(docs: Path) -> None:
    """Write papers.md into `docs`, from the results there."""
    (docs / "papers.md").write_text(render(docs))


if __name__ == "__main__":
    write(ROOT / "docs")
