"""Serves a ModelScenario in simulated time, with the scheduler and the policies of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import msgspec

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.compared import make
from benchmarks.simulation.engine import SimulatedEngine
from benchmarks.simulation.load_watch import LoadWatch, WatchedScheduler
from benchmarks.simulation.machine import FrozenCosts
from benchmarks.simulation.model_ranks import ModelRanks, Poison
from benchmarks.simulation.model_scenario import ModelScenario
from core.config import SchedulerConfig
from core.handles import LoadedComponent
from core.messages.engine import EngineRequest, Failed, Finished, PartialImage
from core.model_info import ModelInfo
from core.scheduling.endings import Output
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.requests.bindings import Bindings


@dataclass(frozen=True)
class Served:
    """What became of the requests of a scenario, after all that fits was loaded."""

    latencies: dict[str, float]  # by id of those with a picture: seconds from arrival
    failures: Counter[str]  # kind of failure -> requests
    in_time: int
    seconds: float  # from the first arrival to the last answer
    loaded: list[LoadedComponent]
    num_failed_loads: int
    watch: LoadWatch
    num_deaths: int
    has_given_up: bool  # whether the engine has, because a rank kept dying
    busy_seconds: list[float]  # by rank


def serve(
    scenario: ModelScenario,
    policy: str | SchedulingPolicy,
    seed: int,
    requests: Sequence[EngineRequest] | None = None,
) -> Served:
    """policy: its name, see `compared.make`, or a new one. requests: by default `scenario.trace(seed)`; their arrivals
    count from when all that fits is loaded.
    """
    requests = scenario.trace(seed) if requests is None else requests
    clock, infos = Clock(), scenario.models.infos
    ranks = ModelRanks(
        scenario.num_ranks,
        infos,
        scenario.models.sizes,
        scenario.budget,
        Poison(scenario.poison_models, scenario.poisonous(seed, requests)),
        scenario.failures,
        Random(seed),
    )
    scheduler = _scheduler(scenario, policy, infos, ranks)
    ends: dict[str, float] = {}
    failures: Counter[str] = Counter()

    def note(outputs: tuple[Output, ...]) -> None:
        for each in outputs:
            if isinstance(each, PartialImage):
                continue
            scheduler.watch.note_end(each.request_id)
            if isinstance(each, Finished):
                ends[each.request_id] = clock.now
            elif isinstance(each, Failed):
                failures[each.failure.kind] += 1

    engine = SimulatedEngine(clock, scheduler, scenario.machine, note, ranks)
    engine.step()
    clock.run()
    start = clock.now
    engine.clocks.busy_seconds = [0.0] * scenario.num_ranks
    ranks.loaded.clear()
    for request in requests:
        moved = msgspec.structs.replace(request, arrival=start + request.arrival)
        clock.at(moved.arrival, partial(engine.add, moved))
    clock.run()
    assert not scheduler.num_requests, f"{scheduler.num_requests} requests are left"
    assert len(ends) + failures.total() == len(requests), "a request has no answer"
    scheduler.check_integrity()
    latencies = {
        each.request_id: ends[each.request_id] - start - each.arrival for each in requests if each.request_id in ends
    }
    alone = {each.request_id: scenario.alone_seconds(each) for each in requests}
    return Served(
        latencies=latencies,
        failures=failures,
        in_time=sum(seconds <= scenario.slo_scale * alone[name] for name, seconds in latencies.items()),
        seconds=clock.now - start,
        loaded=ranks.loaded,
        num_failed_loads=ranks.num_failed_loads,
        watch=scheduler.watch,
        num_deaths=ranks.num_deaths,
        has_given_up=engine.has_given_up,
        busy_seconds=engine.clocks.busy_seconds,
    )


def _scheduler(
    scenario: ModelScenario, policy: str | SchedulingPolicy, infos: dict[str, ModelInfo], ranks: ModelRanks
) -> WatchedScheduler:
    """It knows what steps take, and how large components are."""
    config = SchedulerConfig(max_num_seqs=scenario.edits.max_num_seqs, model_bytes=scenario.budget)
    cost = FrozenCosts()
    scheduler = WatchedScheduler(
        config,
        infos,
        scenario.num_ranks,
        cost=cost,
        policy=make(policy) if isinstance(policy, str) else policy,
        sizes=[LoadedComponent(key, nbytes) for key, nbytes in scenario.models.sizes.items()],
    )
    bindings = Bindings(infos)
    scheduler.watch = LoadWatch(ranks.memory, {name: bindings.needs(name) for name in infos})
    started = [(rank, ranks.start(rank)) for rank in range(scenario.num_ranks)]
    scheduler.learn([sample for name in infos for sample in scenario.machine.samples(name)], started)
    cost.is_frozen = True
    return scheduler
