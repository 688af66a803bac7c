"""ModuleTrace: a published trace: arrivals, latency tables of a pipeline's modules, and measured goodput."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import msgspec

LOOPS = ("dit", "unet", "transformer", "denois")
"""Parts of the names of modules that run once per step."""

HEADS = ("clip", "text", "t5", "encoder")
"""Parts of the names of modules that run before the steps; all others run after them."""

START_SECONDS = {"dit": 0.0015}
"""Part of the name of a loop's module -> seconds that its objectives count for starting a request."""


class Cell(msgspec.Struct, frozen=True):
    """One run of a trace."""

    name: str  # as in the file
    rate: float  # requests per second
    cv: float  # coefficient of variation of the times between arrivals
    slo: float  # objective, as a multiple of the time that a request takes alone


class ModuleTrace(msgspec.Struct, frozen=True):
    """As in the file."""

    source: str
    model: str
    num_requests: int
    latency_seconds: dict[str, dict[int, float]]  # module -> batch size -> seconds
    steps: list[int]  # of each request
    intervals_seconds: dict[str, list[float]]  # "rate=R cv=C" -> time between each arrival and the one before
    goodput: dict[str, dict[str, list[int]]] = {}  # "rate=R cv=C slo=S" -> system -> requests in time, by repetition

    @classmethod
    def read(cls, path: Path) -> ModuleTrace:
        """Raises ValueError for a file of another form, or without one module that runs once per step."""
        trace = msgspec.json.decode(path.read_bytes(), type=cls, strict=False)
        loops = [name for name in trace.latency_seconds if _is_any(name, LOOPS)]
        if len(loops) != 1:
            raise ValueError(f"{path}: one module needs a name with one of {LOOPS}, not {loops}")
        return trace

    @property
    def loop(self) -> str:
        return next(name for name in self.latency_seconds if _is_any(name, LOOPS))

    @property
    def modules(self) -> dict[str, dict[int, float]]:
        """Module -> batch size -> seconds, in the order of a request's way; the first one starts the request."""
        once = {"start": {1: self.start_seconds}} if self.start_seconds or not self.heads else {}
        return once | {name: self.latency_seconds[name] for name in (*self.heads, self.loop, *self.tails)}

    @property
    def start_seconds(self) -> float:
        """Of starting a request."""
        return next((seconds for part, seconds in START_SECONDS.items() if part in self.loop.lower()), 0.0)

    @property
    def heads(self) -> list[str]:
        return [name for name in self.latency_seconds if name != self.loop and _is_any(name, HEADS)]

    @property
    def tails(self) -> list[str]:
        return [name for name in self.latency_seconds if name != self.loop and not _is_any(name, HEADS)]

    def cells(self) -> Iterator[Cell]:
        """Those of which the goodput was measured, in the order of the file."""
        for name in self.goodput:
            rate, cv, slo = _numbers(name)
            yield Cell(name, rate, cv, slo)

    def arrivals(self, cell: Cell) -> list[float]:
        """Seconds at which requests come. Raises KeyError if the file has no such arrivals."""
        for name, intervals in self.intervals_seconds.items():
            if _numbers(name) == [cell.rate, cell.cv]:
                return list(accumulate(intervals))
        raise KeyError(f"{self.model} has no arrivals at rate={cell.rate:g} cv={cell.cv:g}")

    def alone_seconds(self, steps: int) -> float:
        """What a request takes alone, as objectives count it."""
        once = sum(self.latency_seconds[name][1] for name in (*self.heads, *self.tails))
        return self.start_seconds + once + steps * self.latency_seconds[self.loop][1]

    def measured(self, cell: Cell, system: str) -> int | None:
        """Goodput of the best repetition; None where there is none."""
        return max(self.goodput[cell.name].get(system, []), default=None)


def _is_any(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name.lower() for part in parts)


def _numbers(name: str) -> list[float]:
    return [float(number) for number in re.findall(r"=([\d.]+)", name)]
