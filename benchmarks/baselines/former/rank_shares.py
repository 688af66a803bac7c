"""RankShares: which ranks run which ops, by normalised goodput (`shares.py`), and the home of each request."""

from __future__ import annotations

from statistics import mean

from benchmarks.baselines.former.shares import Demand, ranks_of
from benchmarks.baselines.former.work_estimator import WorkEstimator
from core.graph.workflow import Node, op_of
from core.scheduling.requests.deadlines import due
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View

STRETCH = 3.0
"""Partial SLO of requests without a due time, as a multiple of an op's latency alone."""

ALLOT_EVERY = 64
"""Plans after which shares are computed again, because the mix of requests and the speed of the machine drift."""

MIN_SECONDS = 1e-6
"""Least time of a batch, because predictions are 0 where nothing was measured."""


Runs = list[tuple[Request, Node]]


class RankShares:
    """The shares of one policy. A request makes all of its steps on one rank, its home, and all its other work there,
    too, if that rank runs the op.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, tuple[int, ...]] = {}  # op -> ranks that run it
        self._live: tuple[int, ...] = ()  # the live ranks for which this was computed
        self._plans_left = 0
        self._homes: dict[str, int] = {}  # request id -> rank

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._homes.pop(request_id, None)

    def update(self, view: View, requests: list[Request], work: WorkEstimator) -> None:
        """Choose the ranks of all ops if that is due."""
        self._plans_left -= 1
        is_new = {node.op for request in requests for node in request.workflow.nodes} - self._ranks.keys()
        if requests and (self._plans_left < 0 or is_new or self._live != view.ranks):
            self._plans_left, self._live = ALLOT_EVERY, view.ranks
            chosen = ranks_of(_demands(view, requests, work), len(view.ranks))
            self._ranks |= {op: tuple(view.ranks[index] for index in indexes) for op, indexes in chosen.items()}

    def set_home(self, request: Request, rank: int) -> None:
        """Note the rank that is to make a request's steps."""
        self._homes[request.id] = rank

    def step_ranks(self, view: View, request: Request) -> tuple[int, ...]:
        """Ranks that can make a request's steps. A request that has begun stays at its home."""
        home = self._homes.get(request.id)
        if request.status is Status.RUNNING and home in view.ranks:
            return (home,)
        page_rank, steps = view.page_rank(request), request.workflow.steps
        if page_rank in view.ranks:
            return (page_rank,)
        return self._op_ranks(view, steps[-1]) if steps else view.ranks

    def _op_ranks(self, view: View, node: Node) -> tuple[int, ...]:
        """The live ranks that run a node's op; all live ranks if none of them does."""
        return tuple(rank for rank in self._ranks.get(node.op, ()) if rank in view.ranks) or view.ranks

    def home(self, view: View, request: Request) -> int:
        """The rank that makes a request's steps; the first one if its home is dead or unknown."""
        home = self._homes.get(request.id)
        return home if home in view.ranks else view.ranks[0]

    def rank(self, view: View, request: Request, node: Node) -> int:
        """The rank that is to run a node."""
        home = self.home(view, request)
        if node.name in request.workflow.step_names:
            device = view.page_rank(request) if node is request.workflow.paged else None
            return home if device is None else device
        ranks = self._op_ranks(view, node)
        return home if home in ranks else ranks[0]


def _demands(view: View, requests: list[Request], work: WorkEstimator) -> dict[str, Demand]:
    """Op -> what it needs, as the mean over these requests."""
    kinds: dict[str, Runs] = {}  # by op
    for request in requests:
        for node in request.workflow.nodes:
            if request.progress.times(node):
                kinds.setdefault(node.op, []).append((request, node))
    stretch = mean(_stretch(view, request, work) for request in requests)
    return {op: _demand(view, runs, len(requests), stretch, work) for op, runs in kinds.items()}


def _demand(view: View, runs: Runs, num_requests: int, stretch: float, work: WorkEstimator) -> Demand:
    request, node = runs[0]
    keys, op, size = request.keys_of(node), op_of(node), request.work(node)
    most = view.largest_batch(keys, op)
    times = sum(request.progress.times(node) for request, node in runs) / num_requests

    def seconds(number: int) -> float:
        return max(work.batch_seconds(view, keys, op, size, number), MIN_SECONDS)

    number = view.config.max_num_seqs if most is None else max(1, most // max(1, len(size.queries)))
    if op.sharing != "together" and most is None:
        number = 1  # the op runs the items of a batch one after the other
    return Demand(seconds, number, stretch * seconds(1), times)


def _stretch(view: View, request: Request, work: WorkEstimator) -> float:
    """The time from arrival until a request is due, as a multiple of its predicted time alone."""
    time, alone = due(request.head), work.remaining(view, request).alone
    return max(1.0, (time - request.head.arrival) / alone) if time is not None and alone > 0 else STRETCH
