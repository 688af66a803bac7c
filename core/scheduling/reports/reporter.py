"""Reporter: counts what a scheduler has done, and builds its load reports and statistics. It makes no decisions."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import islice

from core.config import SchedulerConfig
from core.costs.cost_model import CostKey, token_seconds
from core.costs.load_report import (
    CopyLine,
    CostLine,
    EngineCosts,
    EngineStats,
    LoadReport,
    QueueChange,
    StepSample,
)
from core.messages.worker import BatchResult, PageCopied
from core.scheduling.node_cache import NodeCache
from core.scheduling.ops.prime import PRIME
from core.scheduling.ranks.in_flight import Flight
from core.scheduling.ranks.ranks import Ranks
from core.scheduling.reports.load_times import LoadTimes
from core.scheduling.reports.predictor import Predictor
from core.scheduling.reports.running_loads import RunningLoads
from core.scheduling.reports.waiting_work import WaitingWork
from core.scheduling.requests.bindings import Bindings
from core.scheduling.requests.live_requests import LiveRequests

COSTS_EVERY = 128
"""Number of batches after which the cost model is reported again."""

MAX_RECENT_STEPS = 512
"""Most steps listed one by one in a `stats` message; of more, the last ones."""


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    steps: int = 0
    mixed_steps: int = 0  # with requests of several served models
    batch_tokens: int = 0  # computed tokens, summed over steps
    batch_requests: int = 0  # requests, summed over steps
    tokens_skipped: int = 0  # tokens that mask-aware steps read from pages
    busy_seconds: dict[str, float] = field(default_factory=dict)  # op -> worker seconds


class Reporter:
    """One per scheduler, which calls a `note_` method at every event."""

    def __init__(
        self,
        config: SchedulerConfig,
        ranks: Ranks,
        predictor: Predictor,
        cache: NodeCache,
        bindings: Bindings,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._predictor = predictor
        self._cost = predictor.cost
        self._cache = cache
        self._num_received = 0
        self._counters = Counters()
        self._recent_steps: list[StepSample] = []
        self._batches_since_costs = COSTS_EVERY
        self._waiting = WaitingWork(predictor)
        self._running = RunningLoads(predictor)
        self._load_times = LoadTimes(bindings, ranks.residency)
        self._changes: list[QueueChange] = []  # of the queue since the last report
        self._is_first = True  # no report was made yet

    # ------------------------------------------------------------------------------------------------- counting

    def note_received(self) -> None:
        """Note that an edit or a template request was received."""
        self._num_received += 1

    def note_batch(self, key: CostKey, flight: Flight, result: BatchResult, *, is_usual: bool) -> None:
        """Note a batch that all its ranks have answered. is_usual: whether it trains the cost model."""
        busy = self._counters.busy_seconds
        busy[key.op] = busy.get(key.op, 0.0) + flight.busy_seconds
        self._batches_since_costs += 1
        if flight.is_step:
            self._note_step(key, flight, result)
        if is_usual:
            if not self._cost.largest_seen(key):  # work without a measurement looks free
                self._batches_since_costs = COSTS_EVERY
            self._cost.observe(key, flight.work, result.seconds)

    def note_copy(self, done: PageCopied) -> None:
        """Note a finished copy of pages. The first copy from a tier triggers a report of the cost model, as the first
        batch of a kind does.
        """
        if done.source not in self._cost.copy_lines():
            self._batches_since_costs = COSTS_EVERY
        self._cost.observe_copy(done.source, done.target, done.nbytes, done.seconds)

    def _note_step(self, key: CostKey, flight: Flight, result: BatchResult) -> None:
        counters, work = self._counters, flight.work
        tokens = sum(work.queries)
        counters.steps += 1
        counters.mixed_steps += flight.is_mixed
        counters.batch_tokens += tokens
        counters.tokens_skipped += sum(work.keys) - tokens
        counters.batch_requests += len(result.items)
        if result.num_parts > 1 or any(item.failure for item in result.items):
            return  # its prediction is for one pass over all items
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
                degree=len(flight.batch.ranks),
            )
        )
        del self._recent_steps[:-MAX_RECENT_STEPS]

    # ------------------------------------------------------------------------------------------------- reports

    def load(self, requests: LiveRequests) -> LoadReport:
        """The load report. Its cost does not depend on the number of waiting requests, and hardly on that of running
        ones. Each change is contained in one report.
        """
        self._follow(requests)
        base = self._predictor.base_seconds(tuple(islice(requests.in_order(), 1)))
        priming, counts = self._cache.seconds_left(), requests.counts
        changes, self._changes = tuple(self._changes), []
        is_first, self._is_first = self._is_first, False
        load_seconds, models = self._load_times.take(requests.needs, self._running_seconds(base))
        return LoadReport(
            num_received=self._num_received,
            num_running=counts[0],
            num_waiting=counts[1],
            num_ranks=len(self._ranks.up),
            lanes=self._ranks.up if self._config.degree == 1 else self._ranks.up[:1],
            running=self._running.by_id(),
            base_seconds=base,
            priming_seconds=priming,
            drain_seconds=priming + self._load_times.seconds + self._drain_seconds(base),
            is_first=is_first,
            queue=changes,
            resident_pages=self._cache.take_resident_pages(),
            models=models,
            room=self._load_times.room(requests.needs),
            load_seconds=load_seconds,
            costs=self._take_costs(),
            refused=self._ranks.residency.refused_models(),
        )

    def stats(self, requests: LiveRequests, steps_repeated: int) -> EngineStats:
        """Totals since start and the accuracy of predictions. Each recent step is contained once. steps_repeated: the
        total of all requests that lost a rank.
        """
        self._follow(requests)
        counters = self._counters
        recent, self._recent_steps = tuple(self._recent_steps), []
        return EngineStats(
            op_seconds=self._op_seconds_left(requests),
            ranks=self._ranks.stats(),
            models=self._ranks.residency.states(),
            quarantine=self._ranks.residency.quarantined(),
            r_squared=self._r_squared(),
            steps=counters.steps,
            mixed_steps=counters.mixed_steps,
            batch_tokens=counters.batch_tokens,
            batch_requests=counters.batch_requests,
            tokens_skipped=counters.tokens_skipped,
            steps_repeated=steps_repeated,
            prime_chunks=self._cache.num_chunks,
            busy_seconds=dict(counters.busy_seconds),
            model_hits=dict(self._ranks.uses.hits),
            model_loads=self._ranks.uses.loads(),
            recent_steps=recent,
            cache=self._cache.stats(),
        )

    def _follow(self, requests: LiveRequests) -> None:
        """Process the changes of the queue and the progress of requests since the last call."""
        changes = requests.take_changes()
        self._changes += changes
        self._waiting.update(changes, requests)
        self._running.update(requests.take_moved(), requests)

    def _take_costs(self) -> EngineCosts | None:
        """The cost model if it is due to be reported again; None if not."""
        if self._batches_since_costs < COSTS_EVERY:
            return None
        self._batches_since_costs = 0
        lines = tuple(
            CostLine(player.name, key.op, line, key.degree, player.controlnets)
            for key, line in self._cost.lines().items()
            for player in self._predictor.players_of(key)
        )
        copies = tuple(CopyLine(source, line) for source, line in self._cost.copy_lines().items())
        return EngineCosts(lines, copies)

    def _r_squared(self) -> dict[str, float]:
        """Op -> quality of its predictions for the model where they are worst."""
        worst: dict[str, float] = {}
        for key, value in self._cost.r_squared().items():
            if key.degree == 1:
                worst[key.op] = min(value, worst.get(key.op, value))
        return worst

    def _op_seconds_left(self, requests: LiveRequests) -> dict[str, float]:
        """Op -> predicted seconds of remaining work, assuming batches as full as the queue allows."""
        running = requests.running
        left = defaultdict(float, self._waiting.op_seconds())
        left[PRIME.name] += self._cache.seconds_left()
        steps = Counter(self._waiting.steps)
        for request in running:
            for key, number in self._predictor.steps_left(request):
                steps[key] += number
            for op, seconds in self._predictor.seconds_by_op(request):
                left[op] += seconds
        together = self._num_together(len(running))
        for key, number in steps.items():
            left[key.op] += number * self._predictor.step_base_seconds(key) / together
        return {op: seconds for op, seconds in left.items() if seconds}

    def _drain_seconds(self, base_seconds: float) -> float:
        """Seconds until all running and waiting requests are done, assuming batches as full as the queue allows."""
        running, waiting = self._running, self._waiting
        seconds, steps = running.seconds + waiting.seconds, running.steps + waiting.num_steps
        return self._together_seconds(seconds, steps * base_seconds, len(running) + len(waiting))

    def _running_seconds(self, base_seconds: float) -> float:
        """Seconds until all running requests are done, if no other one begins."""
        running = self._running
        return self._together_seconds(running.seconds, running.steps * base_seconds, len(running))

    def _together_seconds(self, seconds: float, base_seconds: float, number: int) -> float:
        """Time that so many requests take if ranks share what each takes. base_seconds: of these, the constant part of
        steps, which requests share.
        """
        number = max(1, number)
        shared = base_seconds / min(self._config.max_num_seqs, number)
        return seconds / max(1, min(len(self._ranks.up), number)) + shared

    def _num_together(self, num_running: int) -> int:
        """Number of requests that share a step, assuming batches as full as the queue allows."""
        return min(self._config.max_num_seqs, max(1, num_running + len(self._waiting)))
