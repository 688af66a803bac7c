"""How results are printed: a table for people, then one line of JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Value = float | int | str
Row = tuple[str, str]
"""Name and measured value, as text."""


def print_report(title: str, rows: Sequence[Row], result: Mapping[str, Any], output: Path | None = None) -> None:
    """result: plain numbers under names with units. output: the line of JSON is appended to it."""
    width = max(len(name) for name, _ in rows)
    print(title)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
    print_line(result, output)


def print_line(result: Mapping[str, Any], output: Path | None = None) -> None:
    """The line of JSON alone."""
    line = json.dumps({name: _rounded(value) for name, value in result.items()}, allow_nan=False)
    print(line, flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(line + "\n")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0..1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _rounded(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value
