"""ProductionTrace: requests of a production service with 87 base models, GenTD26: alibaba/clusterdata,
cluster-trace-v2026-GenAI, anonymised, times shifted. `data/gentd26.csv.gz` is its request trace with columns renamed.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).parent.parent / "data" / "gentd26.csv.gz"


class TracedRequest(NamedTuple):
    """One request, as in the file."""

    seconds: float  # when it came, from the first one on
    owner: str
    steps: int  # 30 where the file has none
    model: str
    kind: str  # t2i, i2i or inpaint
    has_adapters: bool
    exec_seconds: float | None  # that it took, without its wait; None: it has no picture


def read() -> Iterator[TracedRequest]:
    """In the order in which they came."""
    with gzip.open(DATA, "rt") as file:
        for row in csv.DictReader(file):
            yield TracedRequest(
                seconds=float(row["t_seconds"]),
                owner=row["owner"],
                steps=int(row["steps"] or 30),
                model=row["model"],
                kind=row["kind"],
                has_adapters=row["num_lora"] != "0",
                exec_seconds=float(row["exec_seconds"] or 0) or None if row["status"] == "succeed" else None,
            )
