"""All systems through HTTP: throughput, latency near capacity, and whether they keep up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.baselines.systems import SYSTEMS
from benchmarks.benchmark_serving import as_json, measure
from benchmarks.evidence.fleet import Fleet, Load
from benchmarks.evidence.plan import Plan
from benchmarks.evidence.results import Result, Results
from benchmarks.load.arrivals import due_times
from benchmarks.load.client import Target, send_on_time
from benchmarks.load.dataset import EditCall, Mix
from benchmarks.load.summary import Context

HEADLINE = ("diffusers", "stencil")
COMPARED = ("diffusers", "diffusers-batch", "diffusers-skip", "stencil")  # at other mask areas and step counts


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
        plan = self._plan
        number = plan.number_of(name, plan.throughput_edits if steps == plan.steps else plan.many_steps_edits)
        mix = Mix(areas, num_inference_steps=str(steps))
        load = Load(f"throughput-{areas}-{steps}", mix, plan.warm_ups, number, plan.concurrency)
        return self._run(f"{load.templates}-{name}", name, load, load.closed_loop)

    def _at_rate(self, kind: str, name: str, share: float, warm_ups: int, number: int, seed: int = 0) -> Result:
        """An open loop, at this share of `capacity`."""
        rate = share * self.capacity

        async def measured(target: Target, calls: list[EditCall]) -> Result:
            due = due_times("poisson", len(calls), rate, 1.0, np.random.default_rng([seed, 1]))
            offered = len(due) / due[-1]
            summary = await measure(target, calls, send_on_time(target, calls, due), Context(request_rate=offered))
            return as_json(summary) | {"load": share, "seed": seed}

        mix = Mix(num_inference_steps=str(self._plan.steps))
        load = Load(kind, mix, warm_ups, number, self._plan.concurrency, seed)
        return self._run(f"{kind}-{name}", name, load, lambda target: load.run(target, measured))

    def _run(self, key: str, name: str, load: Load, measured: Callable[[Target], Result]) -> Result:
        def make() -> Result:
            print(f"serving: {key}", flush=True)
            facts = {"system": name, "areas": load.mix.mask_ratio_dist, "steps": int(load.mix.num_inference_steps)}
            return facts | measured(self._fleet.target(name))

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
                share, counts = self._plan.headline_load, (self._plan.headline_warm_ups, self._plan.headline_edits)
                self._at_rate(f"headline-{seed}", name, share, *counts, seed)

    def _keep_up(self) -> None:
        for share in self._plan.keep_up_loads:
            counts = self._plan.headline_warm_ups, self._plan.keep_up_edits
            if not self._at_rate(f"keep-up-{share:g}", "stencil", share, *counts)["keeps_up"]:
                return
