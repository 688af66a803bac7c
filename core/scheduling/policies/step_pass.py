"""StepPass: what policies have in common in one pass: step-level continuous batching (FlashPS, section 4.3).

Requests of each denoiser share one step; the batch is re-formed at every iteration. Other work runs beside it:
encodings, decodings and previews within a time budget, priming within a share of the step's tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from core.config import PRIME_SHARE
from core.graph.workflow import Node, op_of
from core.scheduling.dispatch import CacheDispatch, Decision, Dispatch, Fetch
from core.scheduling.node_cache import CacheJob
from core.scheduling.requests.bindings import ModelKeys
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View

BatchKey = tuple[ModelKeys, str, tuple[int, ...]]
"""(components, op, ranks): nodes with the same key run in one batch, whatever models they are of."""


MOST_ANYWHERE = 8
"""Most nodes of users' classes, which go anywhere, for one rank and pass. With as many ports, literals and results as
they may have, each is 60 KB of a plan, and two plans must find room in the rank's ring."""


@dataclass(slots=True)
class StepPass(ABC):
    """One pass over a view; `run` is called once. Policies say who is admitted, and override what they do otherwise."""

    view: View
    _candidates: list[tuple[Request, list[Node]]] = field(default_factory=list)  # most urgent first, with ready nodes
    _batches: dict[BatchKey, list[tuple[Request, Node]]] = field(default_factory=dict)  # chosen nodes
    _jobs: Sequence[CacheJob] = ()  # oldest first
    _cache_work: dict[str, CacheDispatch] = field(default_factory=dict)  # job id -> its chosen piece
    _order: list[BatchKey | str] = field(default_factory=list)  # keys of `_batches` and `_cache_work`, as dispatched
    _stage_ms: dict[int, float] = field(default_factory=dict)  # rank -> predicted milliseconds of chosen stage work
    _num_anywhere: Counter[int] = field(default_factory=Counter)  # rank -> nodes of users' classes that are chosen
    _num_given: Counter[int] = field(default_factory=Counter)  # rank -> nodes of users' classes that would run there
    _known_ranks: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)  # see `_ranks_of`

    def run(self) -> list[Decision]:
        """Choose work in this order: work that finishes requests, because it frees memory; indivisible pieces of the
        cache's jobs; encodings and previews; the step; and divisible pieces of the cache's jobs beside the step.
        """
        self._jobs = self.view.jobs()
        self._candidates = [(request, self.view.ready(request)) for request in self._admit()]
        self._choose_stage_work(_finishes)
        self._choose_waited_for_pieces()
        self._choose_stage_work(_is_source_or_side)
        self._choose_cache_work(self._choose_step())
        return [*self._fetches(), *(self._decision(key) for key in self._order)]

    def _decision(self, key: BatchKey | str) -> Decision:
        return self._cache_work[key] if isinstance(key, str) else Dispatch(tuple(self._batches[key]), key[2])

    @abstractmethod
    def _admit(self) -> list[Request]:
        """The requests that may run now, the most urgent first."""

    # ------------------------------------------------------------------------------------------------ stage work

    def _choose_stage_work(self, is_wanted: Callable[[Request, Node], bool]) -> None:
        for request, ready in self._candidates:
            nodes = [node for node in ready if is_wanted(request, node) and self._can_run(request, node)]
            anywhere = [node for node in nodes if op_of(node).has_own_ports]
            for node in anywhere:
                self._choose_anywhere(request, node)
            if others := [node for node in nodes if node not in anywhere]:
                self._choose_nodes(request, others)

    def _choose_nodes(self, request: Request, nodes: Sequence[Node]) -> None:
        """Choose these nodes, or none if they exceed the rank's time budget. A rank's first choice always fits."""
        rank = self._rank(request, nodes[0])
        if self._spend_stage_ms(rank, sum(self.view.seconds(request, node) for node in nodes) * 1e3):
            for node in nodes:
                self._add([(request, node)])

    def _choose_anywhere(self, request: Request, node: Node) -> None:
        """Choose a node of a user's class, unless that exceeds the rank's time budget or MOST_ANYWHERE. A time that
        is not known yet counts as all of the budget.
        """
        (rank,), ms = self._ranks_of(request, node), self.view.seconds(request, node) * 1e3
        is_full = self._num_anywhere[rank] == MOST_ANYWHERE
        if not is_full and self._spend_stage_ms(rank, ms or self.view.config.max_stage_ms):
            self._num_anywhere[rank] += 1
            self._add([(request, node)])

    def _spend_stage_ms(self, rank: int, ms: float) -> bool:
        """Charge predicted milliseconds to a rank's time budget; False if they exceed what is left."""
        spent = self._stage_ms.get(rank)
        if spent is not None and spent + ms > self.view.config.max_stage_ms:
            return False
        self._stage_ms[rank] = (spent or 0.0) + ms
        return True

    # ------------------------------------------------------------------------------------------------ the step

    def _choose_step(self) -> Mapping[int, int]:
        """Choose the most urgent requests that fit, in one batch per denoiser, op and ranks; returns the tokens of each
        rank's step. A request that exceeds the token budget alone gets a step for itself.
        """
        chosen: dict[BatchKey, list[tuple[Request, Node]]] = {}
        steps: dict[tuple[int, ...], tuple[int, int]] = {}  # ranks -> (requests, tokens) chosen for them
        full: set[tuple[int, ...]] = set()
        for request, node in self._ready_steps():
            sizes, ranks = request.sizes(node), self._ranks_of(request, node)
            num_seqs, num_tokens = steps.get(ranks, (0, 0))
            tokens = num_tokens + sizes.num_step_tokens * sizes.num_rows
            is_full = ranks in full or num_seqs == self.view.config.max_num_seqs
            if is_full or (num_seqs and tokens > self.view.max_step_tokens):
                full.add(ranks)
                continue
            chosen.setdefault((request.keys_of(node), node.op, ranks), []).append((request, node))
            steps[ranks] = num_seqs + 1, tokens
        for items in chosen.values():
            self._add(items)
        by_rank = Counter[int]()
        for ranks, (_, tokens) in steps.items():
            by_rank.update(dict.fromkeys(ranks, tokens))
        return by_rank

    def _ready_steps(self) -> Iterator[tuple[Request, Node]]:
        for request, ready in self._candidates:
            for node in ready:
                if node.name in request.workflow.step_names and self._can_run(request, node):
                    yield request, node

    # ------------------------------------------------------------------------------------------------ ranks

    def _rank(self, request: Request, node: Node) -> int:
        """The rank that is to run a node, of those that have its model. A node whose pages are on one device goes
        there, and one of a user's class where the least is to do.
        """
        ranks = self.view.ranks_with(request.keys_of(node))
        if op_of(node).has_own_ports:
            return self._least_given(request, node, ranks)
        device = self._device(request, node)
        return self._rank_among(request, node, ranks) if device is None else device

    def _rank_among(self, request: Request, node: Node, ranks: tuple[int, ...]) -> int:
        """The rank for any other node, of these."""
        return ranks[0]

    def _least_given(self, request: Request, node: Node, ranks: tuple[int, ...]) -> int:
        """An open rank that this pass has given the fewest nodes; of several, one that has the inputs."""

        def cost(rank: int) -> tuple[bool, int, bool]:
            has_inputs = len(ranks) == 1 or self.view.inputs(request, node, (rank,)).are_there
            return rank not in self.view.open_ranks, self._num_given[rank], not has_inputs

        rank = min(ranks, key=cost)
        self._num_given[rank] += 1
        return rank

    def _ranks(self, request: Request, node: Node) -> tuple[int, ...]:
        """The ranks that compute a node together: several for steps whose pages all ranks can read, otherwise one."""
        is_shared = node.name in request.workflow.step_names and op_of(node).parallel != "none"
        degree = self.view.config.degree
        if degree == 1 or not is_shared or request.runs_on_one_rank or self._device(request, node) is not None:
            return (self._rank(request, node),)
        return self.view.ranks_with(request.keys_of(node))[:degree]

    def _ranks_of(self, request: Request, node: Node) -> tuple[int, ...]:
        """The result of `_ranks`, which is called once for each node in a pass."""
        key = request.id, node.name
        ranks = self._known_ranks.get(key)
        if ranks is None:
            ranks = self._known_ranks[key] = self._ranks(request, node)
        return ranks

    def _device(self, request: Request, node: Node) -> int | None:
        """The only rank that can read a node's pages; None: all ranks can."""
        return self.view.page_rank(request) if node is request.workflow.paged else None

    def _can_run(self, request: Request, node: Node) -> bool:
        return self.view.can_run(request, node, self._ranks_of(request, node))

    def _rank_of(self, job: CacheJob) -> int:
        """The rank for a job's next piece: the one that makes steps, unless another is the only one that can run it."""
        return self.view.ranks_with(job.keys)[0] if job.rank is None else job.rank

    def _fetches(self) -> Iterator[Fetch]:
        """Fetches of inputs that candidates' ready nodes need and that only other ranks have."""
        for request, ready in self._candidates if len(self.view.ranks) > 1 else ():
            for node in ready:
                ranks = self._ranks_of(request, node)
                if self.view.can_fetch(request, node, ranks):
                    yield Fetch(request, node, ranks)

    # ------------------------------------------------------------------------------------------------ the cache

    def _choose_cache_work(self, step_tokens: Mapping[int, int]) -> None:
        """Choose pieces of jobs, oldest first, within the tokens that a rank's step leaves. The first piece on a rank
        is never empty, so that priming always advances.
        """
        remaining: dict[int, int] = {}  # rank -> tokens left, once a piece was chosen there
        for job in self._jobs:
            if job.id in self._cache_work or not self._can_prime(job):
                continue
            rank = self._rank_of(job)
            if job.size is not None:
                if job.is_idle_work:
                    self._choose_whole_piece(job)
            elif remaining.get(rank, 1) > 0:
                budget = remaining[rank] if rank in remaining else self._budget_beside(step_tokens.get(rank, 0))
                # Idle work runs in the smallest pieces, so that a new request waits for at most one of them.
                within = 0 if job.is_idle_work else budget
                self._add_cache_work(CacheDispatch(job, within, rank))
                remaining[rank] = budget - self.view.tokens_within(job, within)

    def _budget_beside(self, step_tokens: int) -> int:
        """Tokens that a rank's step leaves."""
        if not step_tokens:
            return self.view.max_step_tokens
        return min(self.view.max_step_tokens - step_tokens, int(PRIME_SHARE * step_tokens))

    def _choose_waited_for_pieces(self) -> None:
        """Choose indivisible pieces that requests wait for. They go before encodings of new requests, because the
        requests that wait for a template's encoding arrived earlier.
        """
        for job in self._jobs:
            if job.size is not None and not job.is_idle_work and self._can_prime(job):
                self._choose_whole_piece(job)

    def _can_prime(self, job: CacheJob) -> bool:
        rank = self._rank_of(job)
        if job.is_idle_work:
            return rank in self.view.idle_ranks and not self._has_work(rank)
        return rank in self.view.open_ranks

    def _has_work(self, rank: int) -> bool:
        """Whether this pass has chosen any work for a rank."""
        has_nodes = any(rank in ranks for _, _, ranks in self._batches)
        return has_nodes or any(rank == piece.rank for piece in self._cache_work.values())

    def _choose_whole_piece(self, job: CacheJob) -> None:
        if self._spend_stage_ms(self._rank_of(job), self.view.seconds_of_piece(job) * 1e3):
            self._add_cache_work(CacheDispatch(job, 0, self._rank_of(job)))

    # ------------------------------------------------------------------------------------------------ decisions

    def _add(self, items: Sequence[tuple[Request, Node]]) -> None:
        """Add nodes of one op, set of components and set of ranks to their batch, which then goes last."""
        request, node = items[0]
        key = request.keys_of(node), node.op, self._ranks_of(request, node)
        if key in self._batches:
            self._order.remove(key)
        self._batches.setdefault(key, []).extend(items)
        self._order.append(key)

    def _add_cache_work(self, work: CacheDispatch) -> None:
        self._cache_work[work.job.id] = work
        self._order.append(work.job.id)


def _finishes(request: Request, node: Node) -> bool:
    """Whether a node makes a result, or works for one after the steps."""
    return node.name in request.workflow.finishing


def _is_source_or_side(request: Request, node: Node) -> bool:
    """Whether a node is an encoding or a preview. They are chosen together, most urgent request first, so that
    encodings of new requests do not delay a preview that its request waits for.
    """
    return node.name not in request.workflow.step_names and not _finishes(request, node)


def eligible(view: View) -> list[Request]:
    """Live requests that may run, the most urgent first. Requests that wait for their model or adapters are left out,
    and those that wait for one that must run alone (`Request.runs_alone`).
    """
    live = [
        each
        for each in view.requests.live()
        if (each.status is Status.RUNNING or view.may_begin(each)) and not each.stands_still
    ]
    return beside_suspects(live)


def beside_suspects(live: list[Request]) -> list[Request]:
    """Those of these requests that may run as far as `Request.runs_alone` is concerned. live: the most urgent first."""
    suspects = [request for request in live if request.runs_alone]
    if not suspects:
        return live
    for each in suspects:
        if each.status is Status.RUNNING:
            return [each]  # it keeps running alone, even if others are more urgent
    first = live.index(suspects[0])
    others = live[:first] + live[first + 1 :]
    if first == 0 and not any(request.status is Status.RUNNING for request in others):
        return suspects[:1]
    return [request for index, request in enumerate(others) if index < first or request.status is Status.RUNNING]
