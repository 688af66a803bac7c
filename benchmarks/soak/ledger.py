"""Ledger: what happened to all requests, counted; what should not have happened, line by line in a file."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Literal

from PIL import Image

from benchmarks.load.pictures import Pixels

Fault = Literal["lost", "wrong"]


class Ledger:
    """Counters by name, and incidents. folder: where incidents and the pictures of wrong answers are written."""

    def __init__(self, folder: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.folder = folder
        self._started = time.monotonic()
        self._request_ids: set[str] = set()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._started

    @property
    def incidents_file(self) -> Path:
        return self.folder / "incidents.jsonl"

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] += number

    def blame(self, fault: Fault, what: str, **details: object) -> None:
        """Count a lost or wrong request, and write it down."""
        self.counts[fault] += 1
        self.note(fault, what, **details)

    def note(self, kind: str, what: str, **details: object) -> None:
        """Write something down."""
        line = {"seconds": round(self.seconds, 1), "kind": kind, "what": what, **details}
        with self.incidents_file.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def keep_pictures(self, name: str, expected: Pixels, came: Pixels) -> list[str]:
        """Save both for a look at them; the files' names."""
        stem = f"{self.counts['wrong']:03d}-{name}"
        files = []
        for suffix, pixels in (("expected", expected), ("came", came)):
            files.append(f"{stem}-{suffix}.png")
            Image.fromarray(pixels).save(self.folder / files[-1])
        return files

    def saw_request_id(self, request_id: str) -> None:
        """Each answer has an id of its own; one that was there before belongs to another request."""
        if not request_id or request_id in self._request_ids:
            self.blame("wrong", "an answer without an id of its own", request_id=request_id)
        self._request_ids.add(request_id)
