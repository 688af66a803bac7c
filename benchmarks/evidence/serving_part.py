"""All systems through HTTP: throughput, latency near capacity, and whether they keep up.

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
from benchmarks.evidence.plan import Plan
from benchmarks.evidence.results import Result, Results
from benchmarks.load.arrivals import due_times
from benchmarks.load.client import Target, send_in_turn, send_on_time, warm_up
from benchmarks.load.dataset import EditCall, Mix, synthetic
from benchmarks.load.server import Server
from benchmarks.load.summary import Context

Measured = Callable[[Target, list[EditCall]], Awaitable[Result]]

HEADLINE = ("diffusers", "stencil")
COMPARED = ("diffusers", "diffusers-batch", "diffusers-skip", "stencil")  # at other mask areas and step counts


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


class ServingPart:
    """Measures what `results` lacks."""

    def __init__(self, fleet: Fleet, plan: Plan, results: Results) -> None:
        self._fleet = fleet
        self._plan = plan
        self._results = results

    def run(self) -> None:
        for name in SYSTEMS:
            self._throughput(name, "public", self._plan.steps)
        for name in COMPARED:
            self._throughput(name, "flashps-prod", self._plan.steps)
            self._throughput(name, "public", self._plan.many_steps)
        self._headline()
        self._keep_up()

    # ------------------------------------------------------------------------------------------------ one run

    def _throughput(self, name: str, areas: str, steps: int) -> Result:
        """A closed loop."""
        plan = self._plan
        number = plan.number_of(name, plan.throughput_edits if steps == plan.steps else plan.many_steps_edits)

        async def measured(target: Target, calls: list[EditCall]) -> Result:
            return as_json(await measure(target, calls, send_in_turn(target, calls, plan.concurrency), Context()))

        key, mix = f"throughput-{areas}-{steps}-{name}", Mix(areas, num_inference_steps=str(steps))
        return self._run(key, name, mix, plan.warm_ups, number, measured)

    def _at_rate(self, key: str, name: str, load: float, warm_ups: int, number: int, seed: int = 0) -> Result:
        """An open loop, at this share of `capacity`."""
        rate = load * self.capacity

        async def measured(target: Target, calls: list[EditCall]) -> Result:
            due = due_times("poisson", len(calls), rate, 1.0, np.random.default_rng([seed, 1]))
            offered = len(due) / due[-1]
            summary = await measure(target, calls, send_on_time(target, calls, due), Context(request_rate=offered))
            return as_json(summary) | {"load": load, "seed": seed}

        return self._run(key, name, Mix(num_inference_steps=str(self._plan.steps)), warm_ups, number, measured, seed)

    def _run(
        self, key: str, name: str, mix: Mix, warm_ups: int, number: int, measured: Measured, seed: int = 0
    ) -> Result:
        def make() -> Result:
            fresh = replace(mix, first_template=zlib.crc32(key.rpartition("-")[0].encode()) % 60_000)
            calls = synthetic(fresh, warm_ups + number, np.random.default_rng(seed))
            target = self._fleet.target(name)

            async def both() -> Result:
                await warm_up(target, calls[:warm_ups], self._plan.concurrency)
                return await measured(target, calls[warm_ups:])

            print(f"serving: {key}", flush=True)
            facts = {"system": name, "areas": mix.mask_ratio_dist, "steps": int(mix.num_inference_steps)}
            return facts | asyncio.run(both())

        return self._results.get_or_make(f"serving/{key}", make)

    @property
    def capacity(self) -> float:
        """Edits per second of diffusers, one at a time."""
        result = self._throughput("diffusers", "public", self._plan.steps)
        rate: float = result["throughput"]
        return rate

    # ------------------------------------------------------------------------------------------------ what is run

    def _headline(self) -> None:
        for seed in range(self._plan.headline_seeds):
            for name in HEADLINE:
                load, counts = self._plan.headline_load, (self._plan.headline_warm_ups, self._plan.headline_edits)
                self._at_rate(f"headline-{seed}-{name}", name, load, *counts, seed)

    def _keep_up(self) -> None:
        for load in self._plan.keep_up_loads:
            counts = self._plan.headline_warm_ups, self._plan.keep_up_edits
            if not self._at_rate(f"keep-up-{load:g}-stencil", "stencil", load, *counts)["keeps_up"]:
                return
