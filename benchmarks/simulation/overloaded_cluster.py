"""OverloadedCluster: a Cluster that admits edits under a latency objective as the server does, or did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from benchmarks.baselines.former.admission import is_refused
from benchmarks.simulation.cluster import Cluster
from benchmarks.simulation.scenario import MODEL, Scenario, make_trace
from core.costs.load_report import LoadReport
from core.costs.prediction_margin import PredictionMargin
from core.messages.engine import EngineRequest, Finished, Output
from core.routing.admission import Outlook, Terms, judge
from core.routing.policies import outlook
from core.routing.request_shape import RequestShape
from core.scheduling.policies.policy import SchedulingPolicy


@dataclass(frozen=True)
class Goodput:
    """rate: edits sent per second. goodput: edits per second that were done within the objective, until the last
    one had ended. ends: how many were in time, late, refused, dropped.
    """

    rate: float
    goodput: float
    ends: Counter[str] = field(default_factory=Counter)
    margin: float = 1.0


class OverloadedCluster(Cluster):
    """One run of a scenario under an objective of `slo_seconds`; None: nothing is refused. scheduling: see Cluster.
    refuses: whether edits that are predicted to be late are refused, as for policies that did not decide this.
    """

    def __init__(
        self,
        scenario: Scenario,
        slo_seconds: float | None,
        seed: int,
        scheduling: Callable[[], SchedulingPolicy] | None = None,
        *,
        refuses: bool = False,
    ) -> None:
        super().__init__(scenario, "mask-aware", seed, scheduling=scheduling)
        self._slo = slo_seconds
        self._refuses = refuses
        self._margin = PredictionMargin()
        self._ends: dict[int, str] = {}
        self._arrivals: dict[int, float] = {}
        self._predictions: dict[int, float] = {}

    def measure(self, slo_seconds: float) -> Goodput:
        """Run it, and count what was done within so many seconds."""
        trace = make_trace(self.scenario, self.seed)
        self.run_trace()
        ends = Counter(
            "in time" if end == "finished" and self._latencies[index] <= slo_seconds else end
            for index, end in self._ends.items()
        )
        seconds = self.clock.now - self._started
        assert sum(ends.values()) == len(trace), "every edit ends once"
        return Goodput(len(trace) / trace[-1].arrival, ends["in time"] / seconds, ends, self._margin.high)

    def _route(self, edit: EngineRequest) -> None:
        index, now = int(edit.request_id), self.clock.now
        self._arrivals[index] = now
        if self._slo is not None:
            ahead = outlook(RequestShape.of_request(edit, MODEL), self.fleet, self._policy, now)
            assert ahead is not None
            if self._refuses and is_refused(ahead, self._slo, self._margin):
                self._ends[index] = "refused"
                return
            self._predictions[index] = ahead.seconds
            if self._has_objective(ahead, self._slo):
                edit = msgspec.structs.replace(edit, objective=now + self._slo)
        super()._route(edit)

    def _has_objective(self, ahead: Outlook, slo: float) -> bool:
        """Whether an edit that is admitted may be dropped once it is late."""
        if self._refuses:
            return ahead.seconds * self._margin.high <= slo
        return judge(ahead, Terms(None, slo), self._margin).has_objective

    def _hear(self, engine: int, report: LoadReport, outputs: tuple[Output, ...]) -> None:
        self.fleet.observe(engine, report, self.clock.now)
        for output in outputs:
            if not output.request_id.isdecimal():
                continue
            index = int(output.request_id)
            self._latencies[index] = seconds = self.clock.now - self._arrivals[index]
            self._ends[index] = "finished" if isinstance(output, Finished) else "dropped"
            if index in self._predictions:
                assert self._slo is not None
                taken = seconds if isinstance(output, Finished) else max(seconds, self._slo)
                self._margin.observe(self._predictions[index], taken)
