"""Production: GenTD26's requests on many devices, with the seconds that they took and loads as slow as they were there.

Requests come ten times as fast as in the trace, without objectives. A workflow is a base model with a kind of request,
with or without adapters. Forecasts are learnt: at first all requests are taken to be alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.baselines.monoliths import Monoliths, Pool
from benchmarks.report import percentile
from benchmarks.simulation.arena import production_trace
from benchmarks.simulation.clock import Clock
from benchmarks.simulation.compared import OURS, make
from benchmarks.simulation.durations import Durations
from benchmarks.simulation.engine import SimulatedEngine
from benchmarks.simulation.lego.measures import Measured
from benchmarks.simulation.lego.numbers import Numbers
from benchmarks.simulation.lego.serving import EDGE, make_scheduler
from benchmarks.simulation.lego.site import PIPELINE, ROWS, STEP_TOKENS, Unit, has_nodes, teach
from benchmarks.simulation.machine import IMAGE_TOKENS, TEXT_TOKENS
from benchmarks.simulation.model_machine import BESIDE_A_LOAD
from benchmarks.simulation.model_ranks import ModelRanks, Poison
from benchmarks.simulation.model_set import SHARED, ModelSet
from benchmarks.simulation.scenario import edit_of
from core.config import SchedulerConfig
from core.costs.cost_model import CostKey, CostModel
from core.graph.op import OPS
from core.graph.work import Work
from core.handles import ModelKey
from core.messages.engine import EngineRequest, Finished, Output
from core.messages.worker import Batch
from core.scheduling.policies.policy import SchedulingPolicy

DATA = Path(__file__).parent.parent / "data" / "gentd26.json"

PACE = 10.0
"""Times are divided by this."""

NUM_PARTS = 8
"""The trace has so many parts, one after the other, one for each seed."""

ROUNDS = 4
"""That a request's steps are simulated in."""

MOST_SECONDS = 300.0
"""Requests that took longer are left out."""

COLD, MEAN_WAIT = "cold starts", "mean wait"
"""Loads of base models or workflows, also of those that no request waits for; seconds."""


class Traced(NamedTuple):
    """One request. exec_seconds: without wait and loads."""

    arrival: float
    base: str
    workflow: str
    exec_seconds: float


@dataclass(frozen=True)
class Fleet:
    """Devices, each with so much memory for weights, that serve one of so many parts of the trace."""

    gigabytes: float
    num_ranks: int = 32
    num_parts: int = NUM_PARTS

    @property
    def budget(self) -> int:
        """Bytes for weights of each device."""
        return round(self.gigabytes * 1e9)


class TracedSystem(NamedTuple):
    """unit: as of a System. policy: makes one for these served models and so many ranks."""

    unit: Unit
    policy: Callable[[Sequence[str], int], SchedulingPolicy]


def _monoliths(models: Sequence[str], num_ranks: int) -> SchedulingPolicy:
    return Monoliths([Pool(frozenset(models), tuple(range(num_ranks)))])


TRACED_SYSTEMS: Mapping[str, TracedSystem] = {
    "Diffusers-C": TracedSystem("workflow", _monoliths),
    "pooled": TracedSystem("workflow, shared", _monoliths),
    "lego": TracedSystem("node", lambda models, num_ranks: make("lego")),
    OURS: TracedSystem("node", lambda models, num_ranks: make(OURS)),
}
"""By name of a system."""


@cache
def requests(seed: int, num_parts: int) -> list[Traced]:
    """The part of the trace of this number; where it has whole seconds, fractions are drawn."""
    random, every = np.random.default_rng(seed), list(production_trace.read())
    done = [each for each in every if each.exec_seconds is not None and each.exec_seconds < MOST_SECONDS]
    part = seed % num_parts
    mine = done[part * len(done) // num_parts : (part + 1) * len(done) // num_parts]
    seconds = np.sort(np.array([each.seconds for each in mine]) + random.uniform(0, 1, len(mine)))
    return [
        Traced(float(when - seconds[0]) / PACE, each.model, _workflow(each), each.exec_seconds or 0.0)
        for when, each in zip(seconds, mine, strict=True)
    ]


def _workflow(traced: production_trace.TracedRequest) -> str:
    return f"{traced.model} {traced.kind}{' with adapters' if traced.has_adapters else ''}"


class TracedSite:
    """What a system's ranks serve in a run: models, sizes, durations."""

    def __init__(self, unit: Unit, numbers: Numbers, traced: Sequence[Traced], seed: int) -> None:
        """seed: of how long models take to load."""
        self.unit, self.numbers, self.traced = unit, numbers, traced
        facts: dict[str, Any] = msgspec.json.decode(DATA.read_bytes())
        random, quantiles = np.random.default_rng((seed, 1)), dict(facts["load_seconds"])
        del quantiles["source"]
        bases = list(dict.fromkeys(each.base for each in traced))
        drawn = np.interp(random.uniform(0, 1, len(bases)), [*map(float, quantiles)], [*quantiles.values()])
        self.load_seconds: dict[str, float] = dict(zip(bases, drawn.tolist(), strict=True))
        """Base model -> seconds."""
        size = "workflow_gigabytes" if unit == "workflow" else "base_gigabytes"
        self._nbytes = round(facts[size]["value"] * 1e9)

    @cached_property
    def models(self) -> ModelSet:
        """A base model's encoders and decoder count with its denoiser."""
        if has_nodes(self.unit):
            common = [ModelKey(SHARED, "text_encoder"), ModelKey(SHARED, "vae")]
            parts = {each.base: (*common, self.key(each)) for each in self.traced}
        else:
            parts = {each.workflow: (self.key(each),) for each in self.traced}
        keys = {key for each in parts.values() for key in each}
        sizes = {key: 1 if key.content == SHARED else self._nbytes for key in keys}
        return ModelSet(parts, sizes, [1.0] * len(parts))

    def key(self, traced: Traced) -> ModelKey:
        """The component of a request that takes time to load."""
        if has_nodes(self.unit):
            return ModelKey(traced.base, "transformer")
        return ModelKey(traced.base if self.unit == "workflow, shared" else traced.workflow, PIPELINE)

    def request(self, index: int) -> EngineRequest:
        """An exact edit, which takes as long as a picture of a prompt; or a whole one."""
        traced, edit = self.traced[index], edit_of(index, self.traced[index].arrival, IMAGE_TOKENS, ROUNDS, 0)
        spec = msgspec.structs.replace(edit.spec, is_mask_aware=False)
        if has_nodes(self.unit):
            return msgspec.structs.replace(edit, model=traced.base, spec=spec)
        return msgspec.structs.replace(edit, model=traced.workflow, spec=spec, workflow=PIPELINE, rounds=())

    def teach(self, cost: CostModel) -> None:
        """A profile in which all requests take the mean of all, and loads, too."""
        usual = fmean(each.exec_seconds for each in self.traced)
        profiles = dict[CostKey, list[tuple[Work, float]]]()
        for name, info in self.models.infos.items():
            for op, kinds, tokens in self._ops():
                keys = tuple(key for key in self.models.models[name] if key.component in kinds)
                profiles[CostKey(info.family, keys, op, info.device, 1)] = [
                    (Work.of([tokens] * number), self.op_seconds(op, [usual] * number)) for number in ROWS
                ]
        teach(cost, profiles)
        cost.observe_load(self._nbytes, fmean(self.load_seconds.values()))

    def _ops(self) -> Sequence[tuple[str, tuple[str, ...], int]]:
        """(op, kinds of components, tokens of a request)"""
        if not has_nodes(self.unit):
            return [(PIPELINE, (PIPELINE,), IMAGE_TOKENS)]
        others = ("text_encode", TEXT_TOKENS), ("image_encode", IMAGE_TOKENS), ("decode", IMAGE_TOKENS)
        return [
            *((op, (OPS[op].component,), tokens) for op, tokens in others),
            ("denoise", (OPS["denoise"].component,), STEP_TOKENS),
        ]

    def op_seconds(self, op: str, whole: Sequence[float]) -> float:
        """Of a batch. whole: exec_seconds of its requests."""
        if op == PIPELINE:
            return sum(whole)
        if op != "denoise":
            return self.numbers.node_seconds * len(whole)
        slope = self.numbers.batch_slope
        return (slope * sum(whole) + (1 - slope) * max(whole)) / ROUNDS + self.numbers.node_seconds


class TracedDurations(Durations):
    """Of the requests of a site."""

    def __init__(self, site: TracedSite) -> None:
        self._site = site
        self._seconds = {site.key(each): site.load_seconds[each.base] for each in site.traced}

    def batch_seconds(self, batch: Batch, work: Work) -> float:
        whole = [self._site.traced[int(item.request_id)].exec_seconds for item in batch.items]
        return self._site.op_seconds(batch.op, whole)

    def load_seconds(self, key: ModelKey) -> float:
        return self._seconds.get(key, 0.0)

    def load_slowness(self) -> float:
        return BESIDE_A_LOAD


def p95_wait(fleet: Fleet, numbers: Numbers, system: str, seed: int, near: float) -> Measured:
    """The 95th percentile of seconds from arrival to picture but for `exec_seconds`. The first EDGE of the requests,
    during which memory fills, is not counted, nor are its loads.
    """
    traced = requests(seed, fleet.num_parts)
    site = TracedSite(TRACED_SYSTEMS[system].unit, numbers, traced, seed)
    first, ranks, ends = int(EDGE * len(traced)), _ranks(site, fleet), dict[int, float]()
    clock, cost = Clock(), CostModel()
    policy = TRACED_SYSTEMS[system].policy(list(site.models.models), fleet.num_ranks)
    limits = SchedulerConfig(max_degree=1, model_bytes=fleet.budget)
    scheduler = make_scheduler(limits, site.models.infos, fleet.num_ranks, site.models.sizes, policy, cost)
    site.teach(cost)
    scheduler.learn((), [(rank, ranks.memory.start(rank, ())) for rank in range(fleet.num_ranks)])

    def note(outputs: tuple[Output, ...]) -> None:
        ends.update({int(each.request_id): clock.now for each in outputs if isinstance(each, Finished)})

    engine = SimulatedEngine(clock, scheduler, TracedDurations(site), note, ranks)
    for index, each in enumerate(traced):
        if index == first:
            clock.at(each.arrival, ranks.loaded.clear)
        clock.at(each.arrival, partial(engine.add, site.request(index)))
    clock.run()
    assert len(ends) == len(traced), f"{len(traced) - len(ends)} requests have no picture"
    waits = [ends[index] - each.arrival - each.exec_seconds for index, each in enumerate(traced)][first:]
    cold = sum(loaded.key.content != SHARED for loaded in ranks.loaded)
    return Measured(percentile(waits, 0.95), {COLD: float(cold), MEAN_WAIT: fmean(waits)})


def _ranks(site: TracedSite, fleet: Fleet) -> ModelRanks:
    return ModelRanks(fleet.num_ranks, site.models.infos, site.models.sizes, fleet.budget, Poison(), 0.0, Random(0))
