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
from core.scheduling.batch_items import inputs_elsewhere, node_work
from core.scheduling.deadlines import MayJoin
from core.scheduling.live_requests import LiveRequests
from core.scheduling.request import Request
from core.scheduling.values import ValueTable

PAGE_RANK = 0
"""The rank that has the page tier: work of the activation cache runs there."""

PredictWork = Callable[[str, Op, Work], float]
"""(model, op, work) -> predicted seconds of running the op once."""


@dataclass(frozen=True, slots=True)
class View:
    """Made by the scheduler for one pass. A policy must not change what it gets from here."""

    config: SchedulerConfig
    requests: LiveRequests  # `live()` in scheduling order: fair between owners, most urgent first; and `running`
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
            ready = self._ready[request.id] = request.progress.ready(request.workflow)
        return ready

    def can_run(self, request: Request, node: Node) -> bool:
        """Whether a ready node can be dispatched now: its rank is open, and its inputs and pages are there."""
        is_open = request.placement[node.name] in self.open_ranks
        return is_open and not inputs_elsewhere(request, node, self._values) and self._has_pages(request, node)

    def seconds(self, request: Request, node: Node) -> float:
        """Predicted time of running a node next, alone."""
        return self._predict(request.head.model, op_of(node), node_work(request, node))

    def _has_pages(self, request: Request, node: Node) -> bool:
        """Whether the cached activations that the node reads are available."""
        reservation, step = request.reservation, request.progress.steps_scheduled
        use = op_of(node).pages
        if use == "latents":
            return reservation is None or (reservation.is_reserved and self._pages.has_latents(reservation.template))
        if use == "none" or not request.spec.is_masked_step(step):
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
