"""The file of results, rewritten after every figure, so that an interrupted run keeps them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
"""JSON: plain numbers under names with units."""

SKIPPED, BROKEN, WITHOUT_GRAPHS = "skipped", "broken", "without_graphs"
"""Sections of text about other sections, by name: why they were not finished, how they failed, and how they failed with
CUDA graphs before they ran without."""

ABOUT_RUNS = ("seconds", "day")
"""Entries of `about` that differ between runs on one machine."""


class Report:
    """Sections by name, in one JSON file."""

    def __init__(self, path: Path, about: Figures, *, goes_on: bool = False) -> None:
        """goes_on: adds to what the file has, if that has the same `about`."""
        self._path = path
        before = read(path) if goes_on else None
        is_same = before is not None and _machine(before["about"]) == _machine(about)
        self._sections: dict[str, Figures] = before["sections"] if before is not None and is_same else {}
        self._seconds_before: float = before["about"]["seconds"] if before is not None and is_same else 0.0
        self._about = about
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time since this process began to run sections."""
        return time.monotonic() - self._started

    @property
    def sections(self) -> dict[str, Figures]:
        return self._sections

    def begin(self, section: str, *, goes_on_without_graphs: bool = False) -> None:
        """Delete an earlier run's figures of the section. goes_on_without_graphs: this run had CUDA graphs at first,
        and keeps why it has them no more."""
        self._forget(section, (SKIPPED, BROKEN) if goes_on_without_graphs else (SKIPPED, BROKEN, WITHOUT_GRAPHS))

    def begin_again(self, section: str, why: str) -> None:
        """Delete the figures of a section that failed with CUDA graphs and is run again without. why: it failed."""
        self._forget(section, (SKIPPED, BROKEN))
        self.put(WITHOUT_GRAPHS, **{section: why})

    def _forget(self, section: str, texts: Sequence[str]) -> None:
        self._sections.pop(section, None)
        for words in texts:
            self._sections.get(words, {}).pop(section, None)
            if words in self._sections and not self._sections[words]:
                del self._sections[words]

    def put(self, section: str, **figures: Any) -> None:
        """Add figures to a section and write the file. They are rounded first: prints and file agree."""
        self._sections.setdefault(section, {}).update(_rounded(figures))
        about = self._about | {"seconds": round(self._seconds_before + self.seconds, 1)}
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps({"about": about, "sections": self._sections}, indent=1) + "\n")
        unfinished.rename(self._path)


def read(path: Path) -> Figures | None:
    """The figures that a run has written; None before the first run."""
    return json.loads(path.read_text()) if path.exists() else None


def _machine(about: Figures) -> Figures:
    return {name: value for name, value in about.items() if name not in ABOUT_RUNS}


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.6g}")
        case dict():
            return {name: _rounded(each) for name, each in value.items()}
        case list() | tuple():
            return [_rounded(each) for each in value]
        case _:
            return value
