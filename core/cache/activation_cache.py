"""ActivationCache: the activation cache as the scheduler knows it.

It translates requests and nodes into the reservations, jobs and entries of the modules below it, which know neither.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from core.cache.activation_cache_manager import ActivationCacheManager
from core.cache.page_costs import PageCosts
from core.cache.page_reservations import PageReservations
from core.cache.priming import Chunk, PrimingJob
from core.cache.priming_batches import chunk_batch, encode_batch, encode_size
from core.cache.request_pages import RequestPages
from core.cache.request_prefetcher import RequestPrefetcher
from core.cache.template_requests import Ending, TemplateRequests
from core.config import CacheConfig
from core.costs.load_report import CacheStats, ResidentPages
from core.failure import Failure
from core.graph.workflow import Node, op_of
from core.handles import TensorKey
from core.messages.engine import DropTemplate, PrimeTemplate
from core.messages.worker import BatchResult, ItemResult, PageCopied
from core.scheduling.node_cache import (
    NO_PAGES,
    CacheBatch,
    CacheJob,
    CacheOrders,
    CacheOutcome,
    NodeCache,
    NodePages,
)
from core.scheduling.ops.prime import PRIME
from core.scheduling.ops.template_encode import TEMPLATE_ENCODE
from core.scheduling.reports.predictor import Predictor
from core.scheduling.requests.bindings import Bindings
from core.scheduling.requests.live_requests import LiveRequests
from core.scheduling.requests.request import Request


class ActivationCache(NodeCache):
    """One per scheduler."""

    def __init__(
        self,
        config: CacheConfig,
        device_bytes: Sequence[int],
        bindings: Bindings,
        predictor: Predictor,
        max_num_seqs: int,
    ) -> None:
        """device_bytes: by rank, device memory for pages; those of `config` are not used. max_num_seqs: most requests
        that run together; pages of twice as many waiting ones are loaded ahead.
        """
        self._bindings, self._models = bindings, bindings.models
        self._costs = PageCosts(predictor, bindings)
        self._may_plan_blocks = config.block_plan == "auto"  # steps may run while their pages are being loaded
        self._manager = ActivationCacheManager.of(config, device_bytes)
        self._pages = PageReservations(self._manager, self._costs.load_wins, len(device_bytes) > 1)
        self._templates = TemplateRequests(self._pages)
        self._has_devices = any(device_bytes)
        has_slow_tier = bool(config.disk_bytes or self._has_devices)
        self._prefetcher = RequestPrefetcher(
            self._models, self._pages, self._templates, 2 * max_num_seqs if has_slow_tier else 0
        )
        self._out: dict[str, Chunk | None] = {}  # id of a job in flight -> its chunk; None: its template is encoded
        self._pageless: set[str] = set()  # ids of requests whose pages were lost, until they are reserved again

    # ------------------------------------------------------------------------------------------------- requests

    def reserve(self, requests: LiveRequests, page_rank: Callable[[str, str], int]) -> None:
        self._prefetcher.reserve(requests, page_rank)

    def has_pages(self, request: Request, node: Node, ranks: tuple[int, ...]) -> bool:
        use, mine = op_of(node).pages, self._record(request)
        if use == "span" and not request.reads_template_pages(node):
            return True
        if mine is None:
            return use == "latents"
        reservation = mine.reservation
        if reservation.is_complete and not self._has_devices:
            return True  # most of the time: all of it is in host memory, which every rank reads
        latents_key = reservation.template.latents_key
        if not reservation.is_reserved or not self._manager.is_readable(latents_key, ranks):
            return False
        if use == "latents":
            return True
        may_load = self._may_plan_blocks and not reservation.is_primed
        return self._pages.has_span(reservation, _sigma(mine, request, node), ranks, may_load=may_load)

    def read(self, request: Request, node: Node) -> NodePages:
        use, mine = op_of(node).pages, self._record(request)
        if mine is None or (use == "span" and not request.reads_template_pages(node)):
            return NO_PAGES
        latents = self._pages.latents(mine.reservation.template)
        if use == "latents":
            return NodePages(latents)
        sigma = _sigma(mine, request, node)
        mine.full_blocks = self._plan_blocks(request, mine, sigma)
        return NodePages(latents, self._pages.span(mine.reservation, sigma), mine.full_blocks)

    def note_result(self, request: Request, node: Node, result: ItemResult) -> None:
        mine = self._record(request)
        if mine is not None and node is request.workflow.paged:
            mine.most_full_blocks = max(mine.most_full_blocks, len(mine.full_blocks))
        if not request.is_live or (mine is not None and mine.must_restart):
            return
        if result.sigmas and not node.canvas and request.spec.reads_template:
            self._prefetcher.need(request, result.sigmas)
        elif mine is not None and node is request.workflow.paged:
            self._prefetcher.trim(request)

    def is_lent(self, request: Request) -> bool:
        mine = self._record(request)
        return mine is not None and mine.reservation.is_read

    def must_restart(self, request: Request) -> bool:
        mine = self._record(request)
        return mine is not None and mine.must_restart and request.is_live

    def note_restart(self, request: Request) -> None:
        mine = self._record(request)
        assert mine is not None
        mine.full_blocks, mine.most_full_blocks = (), 0

    def set_back(self, request: Request) -> None:
        if self._record(request) is not None:
            self._prefetcher.set_back(request, are_lost=request.id in self._pageless)
            self._pageless.discard(request.id)

    def rank_of(self, request: Request) -> int | None:
        mine = self._record(request)
        return None if mine is None or not self._has_devices else self._pages.device_of(mine.reservation)

    def waits_for_others(self, request: Request) -> bool:
        mine = self._record(request)
        return mine is not None and (
            self._prefetcher.waits_for_room(request) or self._pages.is_primed_by_another_model(mine.reservation)
        )

    def outcome(self, request: Request) -> CacheOutcome:
        mine = self._record(request)
        if request.spec.has_own_pages:
            return CacheOutcome("own")
        if mine is None:
            return CacheOutcome()
        reservation = mine.reservation
        return CacheOutcome(
            result="miss" if reservation.is_primed else "hit",
            tier=None if reservation.is_primed else reservation.tier,
            prime_seconds=reservation.prime_seconds,
            full_blocks=mine.most_full_blocks,
        )

    def forget(self, request: Request) -> None:
        self._prefetcher.forget(request)
        self._pageless.discard(request.id)

    def wanted_models(self) -> Mapping[str, float]:
        return self._templates.wanted_models()

    @property
    def has_devices(self) -> bool:
        return self._has_devices

    @property
    def may_lose_pages(self) -> bool:
        return self._may_plan_blocks

    def _record(self, request: Request) -> RequestPages | None:
        return self._prefetcher.records.get(request.id)

    def _plan_blocks(self, request: Request, mine: RequestPages, sigma: float) -> tuple[int, ...]:
        """The blocks that a step computes in full because their pages are still being loaded."""
        loading = self._pages.loading(mine.reservation, sigma) if self._may_plan_blocks else []
        if not loading:
            return ()
        template = mine.reservation.template
        return self._costs.full_blocks(
            request, self._models[template.model], template.scheme.layout.num_blocks, loading
        )

    # ------------------------------------------------------------------------------------------------- work of its own

    def jobs(self) -> list[CacheJob]:
        return [self._offer(job) for job in self._pages.jobs() if self._pages.can_start(job)]

    def tokens_within(self, job_id: str, token_budget: int) -> int:
        return self._pages.job(job_id).plan_chunk(token_budget).tokens

    def start(self, job_id: str, token_budget: int, rank: int) -> CacheBatch:
        job = self._pages.job(job_id)
        assert not job.is_in_flight, f"{job_id} is in flight"
        assert self._pages.rank_of(job) in (None, rank), f"rank {rank} cannot run {job_id}"
        chunk = None if self._pages.needs_latents(job) else job.plan_chunk(token_budget)
        self._out[job_id] = chunk
        return encode_batch(job, self._pages) if chunk is None else chunk_batch(job, chunk, self._pages, rank)

    def finish(self, job_id: str, result: BatchResult) -> Mapping[str, Failure]:
        job, chunk = self._pages.job(job_id), self._out.pop(job_id)
        failure = next((item.failure for item in result.items if item.failure is not None), None)
        if failure is not None:
            return self._fail(job, failure)
        if chunk is None:
            self._pages.finish_latents(job, result.seconds)
        else:
            self._pages.finish_chunk(job, chunk, result.seconds)
        return {}

    def undo(self, job_id: str) -> None:
        del self._out[job_id]
        self._pages.undo(self._pages.job(job_id))

    def waiters_of(self, job_id: str) -> Mapping[str, str]:
        return {each.owner_id: each.owner for each in self._pages.waiters(self._pages.job(job_id))}

    def seconds_left(self) -> float:
        return sum(self._costs.priming(job.template, self._pages.tokens_left(job)) for job in self._pages.all_jobs())

    @property
    def models_in_use(self) -> Collection[str]:
        return {self._pages.job(job_id).template.model for job_id in self._out}

    @property
    def num_chunks(self) -> int:
        return self._pages.num_chunks

    def _offer(self, job: PrimingJob) -> CacheJob:
        is_idle, model, rank = self._pages.is_idle_work(job), job.template.model, self._pages.rank_of(job)
        op, size = (TEMPLATE_ENCODE, encode_size(job)) if self._pages.needs_latents(job) else (PRIME, None)
        return CacheJob(job.id, model, op, self._bindings.keys(model, *op.components), size, is_idle, rank)

    def _fail(self, job: PrimingJob, failure: Failure) -> dict[str, Failure]:
        """Fail a job; request id -> failure of the requests among those that wait for it."""
        waiters = [reservation.owner_id for reservation in self._pages.fail(job)]
        for owner_id in waiters:
            if owner_id in self._templates:
                self._templates.fail(owner_id, failure)
        return {owner_id: failure for owner_id in waiters if owner_id not in self._templates}

    # ------------------------------------------------------------------------------------------------- orders

    def take_orders(self) -> CacheOrders:
        orders, freed = self._manager.take_orders(), self._pages.take_freed()
        return replace(orders, free=tuple(TensorKey(job_id, "", "") for job_id in freed)) if freed else orders

    def finish_copy(self, done: PageCopied) -> None:
        self._pages.finish_copy(done)

    def lose_rank(self, rank: int) -> list[str]:
        lost = []
        for reservation in self._pages.lose_rank(rank):
            if reservation.owner_id in self._templates:
                self._pages.release(reservation)
            else:
                lost.append(reservation.owner_id)
        self._pageless.update(lost)
        return lost

    def join_rank(self, rank: int) -> None:
        self._manager.join_rank(rank)

    def abandon(self, failure: Failure) -> None:
        self._pages.abandon()
        self._out.clear()
        for request_id in self._templates:
            self._templates.fail(request_id, failure)

    # ------------------------------------------------------------------------------------------------- templates

    @property
    def template_requests(self) -> Collection[str]:
        return self._templates

    def add_template(self, prime: PrimeTemplate) -> None:
        self._templates.add(prime, self._models[prime.model])

    def abort_template(self, request_id: str) -> None:
        self._templates.give_up(request_id)

    def fail_templates(self, failures: Mapping[str, Failure], owner: str | None = None) -> None:
        self._templates.fail_models(failures, owner)

    def drop_template(self, drop: DropTemplate) -> None:
        self._pages.drop(drop, self._models[drop.model])

    def take_answers(self) -> list[Ending]:
        return self._templates.take_answers()

    # ------------------------------------------------------------------------------------------------- observation

    def stats(self) -> CacheStats:
        return self._manager.stats()

    def take_resident_pages(self) -> tuple[ResidentPages, ...]:
        return self._manager.take_resident_pages()

    def check_integrity(self) -> None:
        self._pages.check_integrity()
        assert set(self._out) == {job.id for job in self._pages.all_jobs() if job.is_in_flight}


def _sigma(mine: RequestPages, request: Request, node: Node) -> float:
    """The noise level of a node's next run."""
    return mine.sigmas[request.progress.scheduled[node.name]]
