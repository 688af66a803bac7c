"""All systems through HTTP: throughput, latency against the request rate, and whether they keep up.

All servers run at once and take turns, so that a machine that slows down slows all; one that nobody sends to uses no
processor. Every run has templates of its own: what an earlier one left in a cache is of no use.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.baselines.systems import SYSTEMS, Setting, running
from benchmarks.benchmark_serving import as_json, measure
from benchmarks.evidence.plan import AREAS, Plan
from benchmarks.evidence.results import Result, Results
from benchmarks.server import Server
from benchmarks.serving.arrivals import due_times
from benchmarks.serving.client import Target, send_in_turn, warm_up, worker_seconds
from benchmarks.serving.dataset import EditCall, Mix, synthetic
from benchmarks.serving.summary import Context, summarise

HEADLINE = ("diffusers", "stencil")
HOPELESS = 0.75
"""Share of the offered rate that a system achieved, below which its next rate is not tried: its queue only grows."""


@dataclass
class Fleet:
    """The systems' servers, started when first asked for, ended together."""

    setting: Setting
    _stack: ExitStack = field(default_factory=ExitStack)
    _servers: dict[str, Server] = field(default_factory=dict)  # name of a system -> its server

    def target(self, name: str) -> Target:
        if name not in self._servers:
            self._servers[name] = self._stack.enter_context(running(name, self.setting))
        return Target(self._servers[name].url)

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
        for areas, number in zip(AREAS, (self._plan.throughput_edits, self._plan.few_areas_edits), strict=True):
            for name in SYSTEMS:
                self._throughput(name, areas, self._plan.steps, number)
        for name in SYSTEMS:
            self._throughput(name, "public", self._plan.many_steps, self._plan.many_steps_edits)
        self._headline()
        self._keep_up()
        self._rates()

    # ------------------------------------------------------------------------------------------------ one run

    def _throughput(self, name: str, areas: str, steps: int, number: int) -> Result:
        """A closed loop: always enough to do."""

        async def measured(target: Target, calls: list[EditCall]) -> Result:
            before = await worker_seconds(target)
            run = await send_in_turn(target, calls, self._plan.concurrency)
            after = await worker_seconds(target)
            spent = None if before is None or after is None else after - before
            areas = [call.area for call in calls if call.area is not None]
            return as_json(summarise(run, Context(areas=areas, worker_seconds=spent)))

        return self._run(
            f"throughput-{areas}-{steps}-{name}", name, Mix(areas, num_inference_steps=str(steps)), number, measured
        )

    def _at_rate(self, key: str, name: str, load: float, number: int, seed: int) -> Result:
        """An open loop, at this share of what diffusers serves one at a time."""
        rate = load * self.capacity

        async def measured(target: Target, calls: list[EditCall]) -> Result:
            due = due_times("poisson", len(calls), rate, 1.0, np.random.default_rng([seed, 1]))
            offered = len(due) / due[-1]
            summary = await measure(target, calls, due, Context(request_rate=offered))
            return as_json(summary) | {"load": load, "seed": seed}

        return self._run(key, name, Mix(num_inference_steps=str(self._plan.steps)), number, measured, seed)

    def _run(self, key: str, name: str, mix: Mix, number: int, measured: Callable, seed: int = 0) -> Result:  # type: ignore[type-arg]
        def make() -> Result:
            fresh = replace(mix, first_template=zlib.crc32(key.rpartition("-")[0].encode()) % 60_000)
            calls = synthetic(fresh, self._plan.warm_ups + number, np.random.default_rng(seed))
            target = self._fleet.target(name)

            async def both() -> Result:
                await warm_up(target, calls[: self._plan.warm_ups], self._plan.concurrency)
                result: Result = await measured(target, calls[self._plan.warm_ups :])
                return result

            print(f"serving: {key}", flush=True)
            return {"system": name, "areas": mix.mask_ratio_dist, "steps": int(mix.num_inference_steps)} | asyncio.run(
                both()
            )

        return self._results.get_or_make(f"serving/{key}", make)

    @property
    def capacity(self) -> float:
        """Edits per second of diffusers, one at a time."""
        result = self._throughput("diffusers", "public", self._plan.steps, self._plan.throughput_edits)
        rate: float = result["throughput"]
        return rate

    # ------------------------------------------------------------------------------------------------ what is run

    def _headline(self) -> None:
        for seed in range(self._plan.headline_seeds):
            for name in HEADLINE:
                load, number = self._plan.headline_load, self._plan.headline_edits
                self._at_rate(f"headline-{seed}-{name}", name, load, number, seed)

    def _keep_up(self) -> None:
        for load in self._plan.keep_up_loads:
            result = self._at_rate(f"keep-up-{load:g}-stencil", "stencil", load, self._plan.keep_up_edits, 0)
            if not result["keeps_up"]:
                return

    def _rates(self) -> None:
        hopeless = set[str]()
        for load in self._plan.loads:
            number = max(8, round(self._plan.window * load * self.capacity))
            for name in SYSTEMS:
                if name not in hopeless:
                    result = self._at_rate(f"rate-{load:g}-{name}", name, load, number, 0)
                    if result["achieved"] < HOPELESS * result["request_rate"]:
                        hopeless.add(name)
