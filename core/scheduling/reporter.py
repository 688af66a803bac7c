"""Reporter: counts what a scheduler has done, and builds its load reports and statistics. It makes no decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from core.cache.page_reservations import PageReservations
from core.config import SchedulerConfig
from core.costs.cost_model import CostKey, token_seconds
from core.costs.load_report import CopyLine, CostLine, EngineCosts, EngineStats, LoadReport, RequestLoad, StepSample
from core.graph.workflow import Workflow, op_of
from core.handles import ModelKey
from core.messages.worker import BatchResult, PageCopied
from core.model_info import ModelInfo
from core.scheduling.in_flight import Flight
from core.scheduling.ops.prime import PRIME
from core.scheduling.predictor import Predictor
from core.scheduling.request import Request

COSTS_EVERY = 128
"""Number of batches after which the cost model is reported again."""

MAX_RECENT_STEPS = 512
"""Most steps listed one by one in a `stats` message; of more, the last ones."""


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    steps: int = 0
    batch_tokens: int = 0  # computed tokens, summed over steps
    batch_requests: int = 0  # requests, summed over steps
    tokens_skipped: int = 0  # tokens that mask-aware steps read from pages
    busy_seconds: dict[str, float] = field(default_factory=dict)  # op -> worker seconds


class Reporter:
    """One per scheduler, which calls a `note_` method at every event."""

    def __init__(
        self,
        config: SchedulerConfig,
        models: Mapping[str, ModelInfo],
        workflows: Iterable[Workflow],
        predictor: Predictor,
        pages: PageReservations,
    ) -> None:
        self._config = config
        self._models = models
        self._components = sorted({op_of(node).component for workflow in workflows for node in workflow.nodes})
        self._predictor = predictor
        self._cost = predictor.cost
        self._pages = pages
        self._num_received = 0
        self._counters = Counters()
        self._recent_steps: list[StepSample] = []
        self._batches_since_costs = COSTS_EVERY
        self._begun: list[str] = []  # ids of edits begun since the last report

    # ------------------------------------------------------------------------------------------------- counting

    def note_received(self) -> None:
        """Note that an edit or a template request was received."""
        self._num_received += 1

    def note_begun(self, request_ids: Iterable[str]) -> None:
        """Note that these edits run from now on."""
        self._begun += request_ids

    def note_batch(self, key: CostKey, flight: Flight, result: BatchResult, *, is_ok: bool) -> None:
        """Note a batch that all its ranks have finished. It trains the cost model, unless part of it failed."""
        busy = self._counters.busy_seconds
        busy[key.op] = busy.get(key.op, 0.0) + flight.busy_seconds
        self._batches_since_costs += 1
        if flight.is_step:
            self._note_step(key, flight, result)
        if is_ok:
            self._cost.observe(key, flight.work, result.seconds)

    def note_copy(self, done: PageCopied) -> None:
        """Note a finished copy of pages. The first copy from a tier triggers a report of the cost model, since loads
        without a measurement look free.
        """
        if done.source not in self._cost.copy_lines():
            self._batches_since_costs = COSTS_EVERY
        self._cost.observe_copy(done.source, done.target, done.nbytes, done.seconds)

    def _note_step(self, key: CostKey, flight: Flight, result: BatchResult) -> None:
        counters, work = self._counters, flight.work
        tokens = sum(work.queries)
        counters.steps += 1
        counters.batch_tokens += tokens
        counters.tokens_skipped += sum(work.keys) - tokens
        counters.batch_requests += len(result.items)
        if result.num_parts > 1 or any(item.failure for item in result.items):
            return  # the prediction is for one pass over all items
        bound = token_seconds(self._cost.coefficients(key), work)
        self._recent_steps.append(
            StepSample(
                num_requests=len(result.items),
                num_tokens=tokens,
                seconds=result.seconds,
                predicted_seconds=flight.predicted,
                bound_seconds=bound,
                started=result.started,
                request_ids=tuple(item.request_id for item in result.items),
            )
        )
        del self._recent_steps[:-MAX_RECENT_STEPS]

    # ------------------------------------------------------------------------------------------------- reports

    def load(self, requests: Sequence[Request], counts: tuple[int, int]) -> LoadReport:
        """The load report. requests: most urgent first; counts: (running, waiting). Changes since the last report are
        contained once.
        """
        loads = tuple(self._predictor.left_of(request) for request in requests if request.is_live)
        base = self._predictor.base_seconds(requests)
        priming = self._priming_seconds()
        return LoadReport(
            num_received=self._num_received,
            num_running=counts[0],
            num_waiting=counts[1],
            requests=loads,
            base_seconds=base,
            priming_seconds=priming,
            drain_seconds=priming + _drain_seconds(loads, base, self._config.max_num_seqs),
            residency=self._pages.cache.take_residency(),
            costs=self._take_costs(),
            begun=self._take_begun(),
        )

    def stats(self, requests: Sequence[Request]) -> EngineStats:
        """Totals since start and the accuracy of predictions. Recent steps are contained once."""
        counters = self._counters
        recent, self._recent_steps = tuple(self._recent_steps), []
        return EngineStats(
            op_seconds=self._op_seconds_left(requests),
            resident_models=self._resident_models(),
            r_squared={key.op: value for key, value in self._cost.r_squared().items() if key.degree == 1},
            steps=counters.steps,
            batch_tokens=counters.batch_tokens,
            batch_requests=counters.batch_requests,
            tokens_skipped=counters.tokens_skipped,
            prime_chunks=self._pages.num_chunks,
            busy_seconds=dict(counters.busy_seconds),
            recent_steps=recent,
            cache=self._pages.cache.stats(),
        )

    def _take_begun(self) -> tuple[str, ...]:
        begun, self._begun = tuple(self._begun), []
        return begun

    def _take_costs(self) -> EngineCosts | None:
        """The cost model, if it is due to be reported again."""
        if self._batches_since_costs < COSTS_EVERY:
            return None
        self._batches_since_costs = 0
        lines = tuple(CostLine(key.model, key.op, line, key.degree) for key, line in self._cost.lines().items())
        copies = tuple(CopyLine(source, line) for source, line in self._cost.copy_lines().items())
        return EngineCosts(lines, copies)

    def _resident_models(self) -> tuple[ModelKey, ...]:
        return tuple(ModelKey(name, component) for name in self._models for component in self._components)

    def _priming_seconds(self) -> float:
        """Predicted time of the priming that is left."""
        return sum(
            self._predictor.of_priming(job.template, self._pages.tokens_left(job)) for job in self._pages.all_jobs()
        )

    def _op_seconds_left(self, requests: Sequence[Request]) -> dict[str, float]:
        """Predicted worker time left per op, assuming batches as full as the queue allows."""
        live = [request for request in requests if request.is_live]
        left = {PRIME.name: self._priming_seconds()}
        by_loop: dict[str, list[Request]] = {}
        for request in live:
            for op in dict.fromkeys(node.op for node in request.workflow.steps):
                by_loop.setdefault(op, []).append(request)
            for op, seconds in self._predictor.others_of(request):
                left[op] = left.get(op, 0.0) + seconds
        left |= {op: self._loop_seconds_left(members, len(live)) for op, members in by_loop.items()}
        return {op: seconds for op, seconds in left.items() if seconds}

    def _loop_seconds_left(self, requests: Sequence[Request], num_live: int) -> float:
        steps = sum(request.progress.steps_left for request in requests)
        together = min(self._config.max_num_seqs, num_live)
        return sum(map(self._predictor.steps_of, requests)) + steps * self._predictor.base_seconds(requests) / together


def _drain_seconds(loads: Sequence[RequestLoad], base_seconds: float, max_num_seqs: int) -> float:
    """Time until all of these are done, assuming batches as full as possible."""
    together = min(max_num_seqs, max(1, len(loads)))
    base = base_seconds / together
    return sum(load.steps_left * (load.step_seconds + base) + load.other_seconds for load in loads)
