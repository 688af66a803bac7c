"""View: what a scheduling policy sees in one pass. Reading it changes nothing, and costs by what is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from core.cache.page_reservations import PageReservations
from core.cache.priming import PrimingJob
from core.config import SchedulerConfig
from core.graph.op import Op
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.handles import TensorKey
from core.scheduling.batch_items import node_work
from core.scheduling.deadlines import MayJoin
from core.scheduling.inputs import Inputs, Ranks, find_inputs
from core.scheduling.live_requests import LiveRequests
from core.scheduling.request import Request
from core.scheduling.values import ValueTable

PredictWork = Callable[[str, Op, Work], float]
"""(model, op, work) -> predicted seconds of running the op once."""


@dataclass(frozen=True, slots=True)
class View:
    """Made by the scheduler for one pass. A policy must not change what it gets from here."""

    config: SchedulerConfig
    requests: LiveRequests  # `live()` in scheduling order: fair between owners, most urgent first; and `running`
    num_ranks: int  # workers of the engine
    open_ranks: frozenset[int]  # ranks that may be given work
    idle_ranks: frozenset[int]  # those of them that have none
    max_step_tokens: int  # token budget of a step together with what is primed beside it
    may_join: MayJoin | None  # to be asked once per waiting request, in order; None: no request has a due time
    may_plan_blocks: bool  # steps may run while their pages are being loaded
    _pages: PageReservations
    _values: ValueTable
    _predict: PredictWork
    _ready: dict[str, list[Node]] = field(default_factory=dict)  # request id -> its ready nodes, once asked for

    # ------------------------------------------------------------------------------------------------ of requests

    def ready(self, request: Request) -> list[Node]:
        """Nodes of a request whose inputs are made, or promised by a batch that their rank has; in graph order."""
        ready = self._ready.get(request.id)
        if ready is None:
            ready = self._ready[request.id] = request.progress.ready()
        return ready

    def can_run(self, request: Request, node: Node, ranks: Ranks) -> bool:
        """Whether a ready node can be dispatched to these ranks now: they are open, and have its inputs and pages."""
        is_open = self.open_ranks.issuperset(ranks)
        return is_open and self.inputs(request, node, ranks).are_there and self.has_pages(request, node, ranks)

    def inputs(self, request: Request, node: Node, ranks: Ranks) -> Inputs:
        """Where the inputs of a ready node are, as seen from these ranks."""
        return find_inputs(request, node, ranks, self._values)

    def can_fetch(self, request: Request, node: Node, ranks: Ranks) -> bool:
        """Whether inputs of a ready node are on other ranks only, all of which may be given work now."""
        elsewhere = self.inputs(request, node, ranks).elsewhere
        return bool(elsewhere) and all(self._has_open_rank(key) for key in elsewhere)

    def _has_open_rank(self, key: TensorKey) -> bool:
        value = self._values.get(key)
        return value is not None and not self.open_ranks.isdisjoint(value.ranks)

    def seconds(self, request: Request, node: Node) -> float:
        """Predicted time of running a node next, alone."""
        return self._predict(request.head.model, op_of(node), node_work(request, node))

    def has_pages(self, request: Request, node: Node, ranks: Ranks) -> bool:
        """Whether these ranks can read the cached activations that a ready node needs."""
        reservation, step = request.reservation, request.progress.scheduled[node.name]
        use = op_of(node).pages
        if use == "latents":
            return reservation is None or (reservation.is_reserved and self._pages.has_latents(reservation.template))
        if use == "none" or not request.is_masked(node):
            return True
        if reservation is None or not reservation.is_reserved or not self._pages.has_latents(reservation.template):
            return False
        may_load = self.may_plan_blocks and not reservation.is_primed
        return self._pages.span(reservation, request.sigmas[step], may_load=may_load) is not None

    # ------------------------------------------------------------------------------------------------ of the cache

    def jobs(self) -> list[PrimingJob]:
        """Jobs of the activation cache that can be dispatched now if PAGE_RANK is open, oldest first."""
        return [job for job in self._pages.jobs() if self._pages.can_start(job)]

    def needs_latents(self, job: PrimingJob) -> bool:
        """Whether the job's template has to be encoded before its chunks run."""
        return self._pages.needs_latents(job)

    def is_idle_work(self, job: PrimingJob) -> bool:
        """Whether the job is to run only while there is no other work."""
        return self._pages.is_idle_work(job)

    def seconds_of(self, model: str, op: Op, work: Work) -> float:
        """Predicted time of running an op once over this much work."""
        return self._predict(model, op, work)
