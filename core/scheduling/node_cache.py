"""NodeCache: everything that the scheduler asks of a cache whose content nodes read.

The scheduler and its policies know only this interface, which `core.cache` implements. A cache keeps its knowledge of
requests in records of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.handles import CacheResult, EntryRef, TensorKey, Tier

if TYPE_CHECKING:
    from core.costs.load_report import CacheStats, ResidentPages
    from core.failure import Failure
    from core.graph.op import Op
    from core.graph.work import Work
    from core.graph.workflow import Node
    from core.messages.engine import Aborted, DropTemplate, Failed, PrimeTemplate, TemplatePrimed
    from core.messages.worker import BatchResult, Item, ItemResult, PageCopied, PageCopy, PageForget, PageSpan
    from core.scheduling.requests.bindings import ModelKeys
    from core.scheduling.requests.live_requests import LiveRequests
    from core.scheduling.requests.request import Request


@dataclass(frozen=True, slots=True)
class NodePages:
    """The content of the cache that the next run of a node reads."""

    latents: EntryRef | None = None  # clean latents of the request's template; None: it runs without the cache
    span: PageSpan | None = None  # the pages at the step's noise level
    full_blocks: tuple[int, ...] = ()  # blocks to compute in full, because their pages are still on their way


NO_PAGES = NodePages()


@dataclass(frozen=True, slots=True)
class CacheJob:
    """Work that the cache offers. It runs piece by piece, one at a time."""

    id: str  # names its tensors in the worker's store
    model: str  # name
    op: Op  # op of its next piece
    keys: ModelKeys  # the components that its next piece computes with
    size: Work | None  # size of its next piece, if that is indivisible; None: see `NodeCache.tokens_within`
    is_idle_work: bool  # to run only while there is no other work
    rank: int | None  # the one rank that can run its next piece; None: any


@dataclass(frozen=True, slots=True)
class CacheBatch:
    """A piece of a job, to be sent to a rank."""

    op: Op
    items: tuple[Item, ...]
    size: Work


@dataclass(frozen=True, slots=True)
class CacheOrders:
    """The orders for one plan. Workers carry out forget, then delete, then copies."""

    copies: tuple[PageCopy, ...]
    forget: tuple[PageForget, ...]
    delete: tuple[str, ...]  # keys of entries or templates, for their files
    free: tuple[TensorKey, ...] = ()  # values of jobs that have ended

    @property
    def has_any(self) -> bool:
        """Whether there are any orders besides `free`, which can wait."""
        return bool(self.copies or self.forget or self.delete)


@dataclass(frozen=True, slots=True)
class CacheOutcome:
    """The cache's part in a request, for its terminal message. By default it had none."""

    result: CacheResult = "off"
    tier: Tier | None = None  # after a hit: the slowest tier that any of its entries came from
    prime_seconds: float = 0.0  # worker time of jobs while the request waited for them
    full_blocks: int = 0  # most blocks that one of its finished steps computed in full


class NodeCache(ABC):
    """Owned by one scheduler, which calls it at every event. Pure: it issues orders, and touches no data itself."""

    # ------------------------------------------------------------------------------------------------- requests

    @abstractmethod
    def reserve(self, requests: LiveRequests, page_rank: Callable[[str, str], int]) -> None:
        """Reserve the entries that requests need and begin to load them, for the most urgent request first. Called
        before every pass. page_rank: (template, its model) -> rank, see `SchedulingPolicy.page_rank`.
        """

    @abstractmethod
    def has_pages(self, request: Request, node: Node, ranks: tuple[int, ...]) -> bool:
        """Whether these ranks can read the entries that the next run of a node needs. Called only for ops that use
        pages.
        """

    @abstractmethod
    def read(self, request: Request, node: Node) -> NodePages:
        """The content that the next run of a node reads; it `has_pages`. Called once, when the run is dispatched,
        because it decides which blocks the run computes in full.
        """

    @abstractmethod
    def note_result(self, request: Request, node: Node, result: ItemResult) -> None:
        """Note that a run of a node has succeeded. To be called after the request's progress is changed."""

    @abstractmethod
    def is_lent(self, request: Request) -> bool:
        """Whether a worker reads the request's template for a job."""

    @abstractmethod
    def must_restart(self, request: Request) -> bool:
        """Whether a live request has to restart, because pages that it did not wait for were lost."""

    @abstractmethod
    def note_restart(self, request: Request) -> None:
        """Note that a request that must restart does so. Called before its progress is changed; `set_back` follows."""

    @abstractmethod
    def set_back(self, request: Request) -> None:
        """Reserve the entries of a request again, because it repeats steps or has lost pages. Nothing of it may be in
        flight. To be called after its progress is changed.
        """

    @abstractmethod
    def rank_of(self, request: Request) -> int | None:
        """The one rank that can read the pages reserved for a request, which are on its device; None: any rank can."""

    @abstractmethod
    def waits_for_others(self, request: Request) -> bool:
        """Whether a request waits for entries that depend on others: they hold the room for them, or the job that makes
        them is of another model, whose entries are equal.
        """

    @abstractmethod
    def outcome(self, request: Request) -> CacheOutcome:
        """The cache's part in a request so far."""

    @abstractmethod
    def forget(self, request: Request) -> None:
        """Release everything that a request holds, because it has ended."""

    @abstractmethod
    def wanted_models(self) -> Mapping[str, float]:
        """Model -> when the first of its template requests came, monotonic seconds, but for idle work."""

    @property
    @abstractmethod
    def has_devices(self) -> bool:
        """Whether pages may be on a rank's device, where other ranks cannot read them."""

    @property
    @abstractmethod
    def may_lose_pages(self) -> bool:
        """Whether a step can find its pages lost, and is then repeated: no later step of its request may be in flight
        with it.
        """

    # ------------------------------------------------------------------------------------------------- work of its own

    @abstractmethod
    def jobs(self) -> list[CacheJob]:
        """Jobs whose next piece can be dispatched now, oldest first."""

    @abstractmethod
    def tokens_within(self, job_id: str, token_budget: int) -> int:
        """Tokens of a divisible job's next piece within this budget. It is never empty, and may exceed the budget."""

    @abstractmethod
    def start(self, job_id: str, token_budget: int, rank: int) -> CacheBatch:
        """Start the next piece of a job on a rank. token_budget: see `CacheDispatch`. Raises AssertionError for a rank
        that cannot run it.
        """

    @abstractmethod
    def finish(self, job_id: str, result: BatchResult) -> Mapping[str, Failure]:
        """Process the result of the piece that was started; request id -> failure, for the requests that fail with
        it.
        """

    @abstractmethod
    def undo(self, job_id: str) -> None:
        """Note that the piece that was started is lost, because its rank has died. To be called after `lose_rank`."""

    @abstractmethod
    def waiters_of(self, job_id: str) -> Mapping[str, str]:
        """Id -> owner of the requests that wait for a job, template requests included."""

    @abstractmethod
    def seconds_left(self) -> float:
        """Predicted worker time of all jobs."""

    @property
    @abstractmethod
    def models_in_use(self) -> Collection[str]:
        """Models for which a piece of a job is in flight."""

    @property
    @abstractmethod
    def num_chunks(self) -> int:
        """Pieces of divisible jobs started since start."""

    # ------------------------------------------------------------------------------------------------- orders

    @abstractmethod
    def take_orders(self) -> CacheOrders:
        """Orders issued since the last call."""

    @abstractmethod
    def finish_copy(self, done: PageCopied) -> None:
        """Process the end of a copy that was ordered, successful or not."""

    @abstractmethod
    def lose_rank(self, rank: int) -> Collection[str]:
        """Note that a rank has died: its copies and its device's pages are lost, and orders to it wait until it joins
        again. Returns the ids of requests that have lost pages, which must be set back.
        """

    @abstractmethod
    def join_rank(self, rank: int) -> None:
        """Note that a rank that had died was restarted; its device is empty."""

    @abstractmethod
    def abandon(self, failure: Failure) -> None:
        """Release everything and fail all template requests, because the workers are gone."""

    # ------------------------------------------------------------------------------------------------- templates

    @property
    @abstractmethod
    def template_requests(self) -> Collection[str]:
        """Ids of the template requests that are not answered yet."""

    @abstractmethod
    def add_template(self, prime: PrimeTemplate) -> None:
        """Add a request to prime a template and keep its pages."""

    @abstractmethod
    def abort_template(self, request_id: str) -> None:
        """Abort a template request."""

    @abstractmethod
    def fail_templates(self, failures: Mapping[str, Failure], owner: str | None = None) -> None:
        """Fail all template requests of these models and this owner. failures: model -> why. owner: None: of all."""

    @abstractmethod
    def drop_template(self, drop: DropTemplate) -> None:
        """Drop a template's pages once no request uses them."""

    @abstractmethod
    def take_answers(self) -> list[TemplatePrimed | Failed | Aborted]:
        """Answers to template requests that have ended since the last call."""

    # ------------------------------------------------------------------------------------------------- observation

    @abstractmethod
    def stats(self) -> CacheStats:
        """Totals since start, and current content."""

    @abstractmethod
    def take_resident_pages(self) -> tuple[ResidentPages, ...]:
        """The resident pages of each template whose pages have come or gone since the last call."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError unless all records agree."""
