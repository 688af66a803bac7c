"""The file of results, rewritten after every figure, so that an interrupted run keeps them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
"""JSON: plain numbers under names with units."""

SKIPPED, BROKEN = "skipped", "broken"
"""Sections of text about other sections, by name: why they were not finished, and how they failed."""


class Report:
    """Sections by name, in one JSON file."""

    def __init__(self, path: Path, about: Figures, *, goes_on: bool = False) -> None:
        """goes_on: adds to what the file has, if that has the same `about`."""
        self._path = path
        before = read(path) if goes_on else None
        is_same = before is not None and _without_seconds(before["about"]) == about
        self._sections: dict[str, Figures] = before["sections"] if before is not None and is_same else {}
        self._seconds_before: float = before["about"]["seconds"] if before is not None and is_same else 0.0
        self._about = about
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since this process began to run sections."""
        return time.monotonic() - self._started

    @property
    def sections(self) -> dict[str, Figures]:
        return self._sections

    def begin(self, section: str) -> None:
        """Delete an earlier run's figures of the section."""
        self._sections.pop(section, None)
        for words in (SKIPPED, BROKEN):
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
    """What a run has written; None before the first run."""
    return json.loads(path.read_text()) if path.exists() else None


def _without_seconds(about: Figures) -> Figures:
    return {name: value for name, value in about.items() if name != "seconds"}


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
