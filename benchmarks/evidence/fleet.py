"""The systems' servers, and runs on them.

All servers run at once and take turns, so that a machine that slows down slows all of them; idle ones use no CPU time.
Every run has templates of its own, so that it finds nothing of earlier runs in a cache.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.baselines.systems import SYSTEMS, Setting, running
from benchmarks.benchmark_serving import as_json, measure
from benchmarks.evidence.results import Result
from benchmarks.load.client import Target, send_in_turn, warm_up
from benchmarks.load.dataset import EditCall, Mix, synthetic
from benchmarks.load.server import Server
from benchmarks.load.summary import Context

Measured = Callable[[Target, list[EditCall]], Awaitable[Result]]

MOST_TEMPLATES = 60_000
"""Of 256 x 256 px, less those of one run."""


@dataclass
class Fleet:
    """The systems' servers, started at first use, ended together."""

    setting: Setting
    _stack: ExitStack = field(default_factory=ExitStack)
    _servers: dict[str, Server] = field(default_factory=dict)  # name of a system -> its server

    def target(self, name: str) -> Target:
        if name not in self._servers:
            self._servers[name] = self._stack.enter_context(running(name, self.setting))
        return Target(self._servers[name].url, extra=SYSTEMS[name].fields)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


@dataclass(frozen=True)
class Load:
    """The edits of a run. templates: a name; loads with another one share no template. number: of edits that count,
    after the warm-ups. clients: that send at once, in warm-ups and closed loops.
    """

    templates: str
    mix: Mix
    warm_ups: int
    number: int
    clients: int
    seed: int = 0

    def run(self, target: Target, measured: Measured) -> Result:
        """What `measured` finds after the warm-ups. Raises WarmUpError."""
        fresh = replace(self.mix, first_template=zlib.crc32(self.templates.encode()) % MOST_TEMPLATES)
        calls = synthetic(fresh, self.warm_ups + self.number, np.random.default_rng(self.seed))

        async def both() -> Result:
            await warm_up(target, calls[: self.warm_ups], self.clients)
            return await measured(target, calls[self.warm_ups :])

        return asyncio.run(both())

    def closed_loop(self, target: Target) -> Result:
        """Figures of clients that each send their next edit when the last one is back."""

        async def measured(target: Target, calls: list[EditCall]) -> Result:
            return as_json(await measure(target, calls, send_in_turn(target, calls, self.clients), Context()))

        return self.run(target, measured)
