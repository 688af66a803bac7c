"""View: what a scheduling policy sees in one pass. Reading it changes nothing; answers are computed when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from core.config import SchedulerConfig
from core.graph.op import Op
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.handles import ModelKey, RankIds, TensorKey
from core.scheduling.node_cache import CacheJob, NodeCache
from core.scheduling.ranks.in_flight import InFlight
from core.scheduling.ranks.ranks import Ranks
from core.scheduling.ranks.residency import Residency
from core.scheduling.ranks.step_limit import StepLimit
from core.scheduling.reports.predictor import Predictor
from core.scheduling.requests.bindings import ModelKeys, Needs
from core.scheduling.requests.live_requests import LiveRequests
from core.scheduling.requests.request import Request
from core.scheduling.requests.work_left import WorkLeft
from core.scheduling.values.inputs import Inputs, find_inputs
from core.scheduling.values.values import ValueTable

LEAST_WAIT = 1e-4
"""Seconds. It is not worth another pass to wait for less."""


@dataclass(frozen=True, slots=True)
class View:
    """Made by the scheduler for one pass. A policy must not change the objects that it gets from here."""

    config: SchedulerConfig
    requests: LiveRequests  # `live()` in scheduling order: fair between owners, most urgent first; and `running`
    ranks: tuple[int, ...]  # live ranks, at least one, ascending
    open_ranks: frozenset[int]  # ranks that may be given work
    idle_ranks: frozenset[int]  # open ranks that have no work
    may_be_ahead: bool  # ranks may be sent work before what it waits for is done
    max_step_tokens: int  # token budget of a step together with what is primed beside it
    _now: float
    _in_flight: InFlight
    _residency: Residency
    startable: frozenset[ModelKeys] | None  # see `Loads`
    _cache: NodeCache
    _values: ValueTable
    _predictor: Predictor
    _inputs: dict[tuple[str, str, RankIds], Inputs] = field(default_factory=dict)  # answers of `inputs`
    _ready: dict[str, list[Node]] = field(default_factory=dict)  # request id -> answer of `ready`

    # ------------------------------------------------------------------------------------------------ of requests

    def ready(self, request: Request) -> list[Node]:
        """Nodes of a request that may run now, in graph order: their inputs are made, or are being made, and so
        are the adapters that they are to have loaded."""
        ready = self._ready.get(request.id)
        if ready is None:
            ready = request.progress.ready()
            if request.lacks_adapters:
                ready = [node for node in ready if not request.awaits_adapters(node)]
            self._ready[request.id] = ready
        return ready

    def can_run(self, request: Request, node: Node, ranks: RankIds) -> bool:
        """Whether a ready node can be dispatched to these ranks now: they are open, and have its model's components,
        its inputs and its pages, or need not wait long for inputs (see `seconds_until_sent`)."""
        is_open = self.open_ranks.issuperset(ranks) and self.has_components(request, node, ranks)
        return is_open and not self.seconds_until_sent(request, node, ranks) and self.has_pages(request, node, ranks)

    @property
    def residency_version(self) -> int:
        """Changes whenever ranks begin to load, have loaded or have dropped components."""
        return self._residency.version

    @property
    def is_complete(self) -> bool:
        """Whether all that is served is loaded on all live ranks."""
        return self._residency.is_complete

    def may_begin(self, request: Request) -> bool:
        """Whether a waiting request may begin as far as its model is concerned: it is loaded, and no earlier request
        waits for room for another model.
        """
        if self.startable is not None and not self.startable.issuperset(request.needs):
            return False
        return self._residency.is_complete or not self._residency.missing(request.needs)

    def has_components(self, request: Request, node: Node, ranks: RankIds) -> bool:
        """Whether these ranks have the components that a node needs."""
        return self._residency.has(request.keys_of(node), ranks)

    def ranks_with(self, keys: ModelKeys) -> RankIds:
        """The live ranks that have these components, those that have had them for longest first; all live ranks while
        none has them.
        """
        return self._residency.homes(keys).ranks or self.ranks

    def ranks_to_have(self, keys: ModelKeys) -> RankIds:
        """The live ranks that have these components or are loading them."""
        homes = self._residency.homes(keys)
        return (*homes.ranks, *(rank for ranks in homes.coming for rank in ranks if rank not in homes.ranks))

    def is_loading(self, rank: int) -> bool:
        """Whether a rank is loading anything."""
        return self._residency.is_loading((rank,))

    def has_all(self, rank: int, needs: Needs) -> bool:
        """Whether a rank is among `ranks_with` of each of these components."""
        return self._residency.is_complete or all(rank in self.ranks_with(keys) for keys in needs)

    def inputs(self, request: Request, node: Node, ranks: RankIds) -> Inputs:
        """Where the inputs of a ready node are, as seen from these ranks."""
        key = request.id, node.name, ranks
        found = self._inputs.get(key)
        if found is None:
            found = self._inputs[key] = find_inputs(request, node, ranks, self._values)
        return found

    def can_read(self, request: Request, node: Node, ranks: RankIds) -> bool:
        """Whether these ranks can read all inputs of a ready node if it is sent to them now. What works for steps waits
        for those that other ranks have, or make in batches that were sent: they send them.
        """
        inputs = self.inputs(request, node, ranks)
        return inputs.are_there or (op_of(node).serves_step and inputs.senders is not None)

    def seconds_until_sent(self, request: Request, node: Node, ranks: RankIds) -> float:
        """Predicted time until a ready node may be sent to these ranks as far as its inputs are concerned; inf: not
        before others answer. What works for steps may be sent when it is predicted to wait no longer for the ranks that
        send it inputs than `max_ahead_ms`: so it begins as soon as they have them.
        """
        inputs = self.inputs(request, node, ranks)
        if inputs.are_there:
            return 0.0
        if inputs.senders is None or not op_of(node).serves_step:
            return inf
        if inputs.awaited and not self.may_be_ahead:
            return inf
        return max(map(self._seconds_until_nearly_done, inputs.senders))

    def _seconds_until_nearly_done(self, rank: int) -> float:
        """Predicted time until a rank is done with its work within `max_ahead_ms`; inf: not before it answers."""
        if rank in self._in_flight.idle_ranks:
            return 0.0
        left = self.seconds_left(rank)
        if left is None or not self.may_be_ahead:
            return inf
        too_long = left - self.config.max_ahead_ms / 1e3
        return too_long if too_long > LEAST_WAIT else 0.0

    def can_fetch(self, request: Request, node: Node, ranks: RankIds) -> bool:
        """Whether only other ranks have inputs of a ready node, and for each input one of them is open. What works for
        steps is sent its inputs while it waits instead."""
        if op_of(node).serves_step:
            return False
        elsewhere = self.inputs(request, node, ranks).elsewhere
        return bool(elsewhere) and all(self._has_open_rank(key) for key in elsewhere)

    def _has_open_rank(self, key: TensorKey) -> bool:
        value = self._values.get(key)
        return value is not None and not self.open_ranks.isdisjoint(value.ranks)

    def seconds(self, request: Request, node: Node, degree: int = 1) -> float:
        """Predicted time of running a node next, alone on so many ranks; 0 if that is unknown."""
        return self._predictor.op_seconds(request.keys_of(node), op_of(node), request.work(node), degree)

    def batch_seconds(self, keys: ModelKeys, op: Op, work: Work, number: int = 1) -> float:
        """Predicted time of a batch of this number of items, each of this work; 0 for work unlike any observed."""
        every = work if number == 1 else Work(work.queries * number, work.keys * number)
        return self._predictor.batch_seconds(keys, op, every)

    def load_seconds(self, request: Request) -> float:
        """Predicted time until the model of a request is loaded."""
        return self._residency.seconds_left(request.needs)

    def load_seconds_on(self, rank: int, keys: Sequence[ModelKey]) -> float:
        """Predicted time of loading what a live rank neither has nor is loading of these components; inf: they are
        refused there now.
        """
        residency = self._residency
        if residency.is_complete:
            return 0.0
        if residency.refusal_on((rank,), keys, self._now) is not None:
            return inf
        return sum(map(residency.load_seconds, residency.lacking(keys, (rank,))))

    def work_left(self, request: Request) -> WorkLeft:
        """The remaining work of a request."""
        return self._predictor.work_left(request)

    @property
    def predictions(self) -> int:
        """Changes when all predictions are made again, because the cost model has learnt meanwhile."""
        return self._predictor.generation

    def step_seconds(self, keys: ModelKeys, op: Op, work: Work, degree: int) -> float:
        """Predicted time of a step of one request alone on this many ranks; 0 if that is unknown, as it is at degrees
        that were not profiled.
        """
        return self._predictor.step_seconds(keys, op, work, degree)

    @property
    def slowness(self) -> float:
        """Time that steps have taken lately, with the pauses between them, as a multiple of what was predicted."""
        return self._predictor.slowness.value

    def wait_seconds(self, rank: int) -> float:
        """Predicted time until a rank has done the work that it was sent; 0 if it has none or is overdue."""
        return self._in_flight.wait_seconds(rank, self._now)

    def seconds_left(self, rank: int) -> float | None:
        """Predicted time until a busy rank has done the work that it was sent: below 0 if it is overdue, None if the
        time of some of it is unknown.
        """
        return self._in_flight.seconds_left(rank, self._now)

    def largest_batch(self, keys: ModelKeys, op: Op) -> int | None:
        """Rows of the largest batch in the op's profile; None: it has no profile."""
        return self._predictor.largest_batch(keys, op)

    def largest_seen(self, keys: ModelKeys, op: Op) -> int:
        """Rows of the largest batch of an op that was profiled, or has run often on one rank; 0: there is none."""
        return self._predictor.largest_seen(keys, op)

    def page_rank(self, request: Request) -> int | None:
        """The one rank that can read the pages reserved for a request, which are on its device; None: any rank can."""
        return self._cache.rank_of(request)

    def has_pages(self, request: Request, node: Node, ranks: RankIds) -> bool:
        """Whether these ranks can read the content of the cache that a ready node needs."""
        return op_of(node).pages == "none" or self._cache.has_pages(request, node, ranks)

    # ------------------------------------------------------------------------------------------------ of the cache

    def jobs(self) -> list[CacheJob]:
        """Jobs of the cache whose next piece can be dispatched now, oldest first. A job that names a rank runs only
        there.
        """
        if self._residency.is_complete:
            return self._cache.jobs()
        return [job for job in self._cache.jobs() if self._has_rank(job)]

    def _has_rank(self, job: CacheJob) -> bool:
        ranks = self._residency.homes(job.keys).ranks
        return bool(ranks) if job.rank is None else job.rank in ranks

    def tokens_within(self, job: CacheJob, token_budget: int) -> int:
        """See `NodeCache.tokens_within`."""
        return self._cache.tokens_within(job.id, token_budget)

    def seconds_of_piece(self, job: CacheJob) -> float:
        """Predicted time of a job's next piece, which is indivisible."""
        assert job.size is not None
        return self._predictor.op_seconds(job.keys, job.op, job.size)


@dataclass(frozen=True, slots=True)
class ViewMaker:
    """Makes the views of one scheduler."""

    config: SchedulerConfig
    requests: LiveRequests
    ranks: Ranks
    in_flight: InFlight
    residency: Residency
    cache: NodeCache
    values: ValueTable
    predictor: Predictor
    step_limit: StepLimit

    @property
    def open_ranks(self) -> frozenset[int]:
        """Ranks that may be given work."""
        return self._idle_ranks | self._nearly_idle_ranks

    def view(
        self,
        now: float,
        passed_over: frozenset[int] = frozenset(),
        startable: frozenset[ModelKeys] | None = None,
    ) -> View:
        """The view of a pass that begins now. passed_over: ranks that are to get no work. startable: see `Loads`."""
        return View(
            config=self.config,
            requests=self.requests,
            ranks=self.ranks.up,
            open_ranks=self.open_ranks - passed_over,
            idle_ranks=self._idle_ranks - passed_over,
            may_be_ahead=self._may_be_ahead,
            max_step_tokens=self.step_limit.tokens,
            _now=now,
            _in_flight=self.in_flight,
            startable=startable,
            _residency=self.residency,
            _cache=self.cache,
            _values=self.values,
            _predictor=self.predictor,
        )

    @property
    def _idle_ranks(self) -> frozenset[int]:
        return self.in_flight.idle_ranks.intersection(self.ranks.up)

    @property
    def _nearly_idle_ranks(self) -> frozenset[int]:
        """Busy ranks that may be given work. They are nearly done, so that the round trip of a small step is hidden
        behind their work, and new requests do not wait long.
        """
        return self.in_flight.nearly_idle_ranks if self._may_be_ahead else frozenset()

    @property
    def _may_be_ahead(self) -> bool:
        """Not while a preview is pending, because work that is sent ahead would delay it."""
        return self.in_flight.max_plans > 1 and not self.requests.has_pending_previews
