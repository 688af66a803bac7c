"""Resumes: how far requests went back when a worker died, as the server's log says it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

MESSAGE = "goes on after a worker's death"  # as engine/engine_core/engine_core.py logs it


class Resume(msgspec.Struct, frozen=True):
    """One request after one death."""

    steps_done: int  # that it did not repeat
    steps_repeated: int
    steps_between: int  # from one checkpoint to the next

    @property
    def is_within_bound(self) -> bool:
        """A death may take the steps since the last checkpoint, and the one that ran while that was written."""
        return self.steps_repeated <= self.steps_between + 1


@dataclass(frozen=True)
class Resumes:
    """All of a server."""

    every: Sequence[Resume] = ()

    @classmethod
    def of_log(cls, log: Path) -> Resumes:
        """log: of a server with --log-format json."""
        return cls(tuple(_read(log)))

    @property
    def steps_repeated(self) -> int:
        return sum(resume.steps_repeated for resume in self.every)

    @property
    def num_beyond_bound(self) -> int:
        return sum(not resume.is_within_bound for resume in self.every)

    def __str__(self) -> str:
        most = max((resume.steps_repeated for resume in self.every), default=0)
        spared = sum(resume.steps_done for resume in self.every)
        return (
            f"{len(self.every)} requests went on, {self.steps_repeated} steps repeated (at most {most}, "
            f"{self.num_beyond_bound} times more than between checkpoints), {spared} not"
        )


def _read(log: Path) -> Iterator[Resume]:
    decoder = msgspec.json.Decoder(Resume)
    for line in log.read_bytes().splitlines():
        if MESSAGE.encode() in line:
            yield decoder.decode(line)
