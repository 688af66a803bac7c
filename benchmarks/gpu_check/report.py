"""The file of results: written anew after every figure, so that a run that was cut off leaves what it had."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
"""What JSON can hold: plain numbers under names with units."""


class Report:
    """Sections by name, in one JSON file. clock: seconds that never go back."""

    def __init__(self, path: Path, about: Figures) -> None:
        self._path = path
        self._sections: dict[str, Figures] = {}
        self._about = about
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._started

    @property
    def sections(self) -> dict[str, Figures]:
        return self._sections

    def put(self, section: str, **figures: Any) -> None:
        """Add figures to a section, and write all there is."""
        self._sections.setdefault(section, {}).update(figures)
        whole = {"about": self._about | {"seconds": round(self.seconds, 1)}, "sections": self._sections}
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(_rounded(whole), indent=1, allow_nan=False) + "\n")
        unfinished.rename(self._path)


def read(path: Path) -> Figures | None:
    """What a run has written, None where there was none."""
    return json.loads(path.read_text()) if path.exists() else None


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
