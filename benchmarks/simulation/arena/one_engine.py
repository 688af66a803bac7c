"""OneEngine: requests on one engine without a router, with a true machine that may differ from the profiled one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from benchmarks.simulation.arena.degree_machine import DegreeMachine
from benchmarks.simulation.clock import Clock
from benchmarks.simulation.durations import Durations
from benchmarks.simulation.engine import SimulatedEngine
from benchmarks.simulation.scenario import MODEL, prime_template
from core.config import CacheConfig, SchedulerConfig
from core.messages.engine import EngineRequest, Finished, Output
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.scheduler import StepScheduler


@dataclass(frozen=True)
class OneEngine:
    """profiled: the machine that the engine was calibrated on. true: what batches really take; None: as profiled.
    num_templates: primed before the first request, in host memory. degree: see SchedulerConfig.
    """

    num_ranks: int
    max_num_seqs: int = 16
    degree: int = 1
    num_templates: int = 4
    profiled: DegreeMachine = field(default_factory=DegreeMachine)
    true: Durations | None = None

    def serve(self, policy: SchedulingPolicy, requests: Sequence[EngineRequest]) -> dict[str, float]:
        """Request id -> latency in seconds of all that were finished. Arrivals and objectives count from when all
        templates are primed.
        """
        clock, ends = Clock(), dict[str, float]()
        scheduler = StepScheduler(
            SchedulerConfig(max_num_seqs=self.max_num_seqs, degree=self.degree),
            {MODEL.name: MODEL},
            self.num_ranks,
            cache=CacheConfig(host_bytes=32 * 10**9, device_bytes=0),
            policy=policy,
        )
        scheduler.learn(self.profiled.samples(MODEL.name))

        def note(outputs: tuple[Output, ...]) -> None:
            ends.update((each.request_id, clock.now) for each in outputs if isinstance(each, Finished))

        engine = SimulatedEngine(clock, scheduler, self.true or self.profiled, note)
        for template in range(self.num_templates):
            scheduler.add_template(prime_template(template))
            engine.step()
        clock.run()
        start = clock.now
        for request in requests:
            objective = None if request.objective is None else start + request.objective
            moved = msgspec.structs.replace(request, arrival=start + request.arrival, objective=objective)
            clock.at(moved.arrival, partial(engine.add, moved))
        clock.run()
        assert not scheduler.num_requests, "requests are left"
        arrivals = {request.request_id: start + request.arrival for request in requests}
        return {name: end - arrivals[name] for name, end in ends.items()}
