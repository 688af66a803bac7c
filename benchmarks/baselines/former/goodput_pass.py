"""GoodputPass: the work that the policy goodput chooses in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.baselines.former.rank_shares import RankShares
from benchmarks.baselines.former.step_batching import StepPass
from core.graph.workflow import Node
from core.scheduling.node_cache import CacheJob
from core.scheduling.requests.deadlines import due
from core.scheduling.requests.request import Request, Status


@dataclass(slots=True)
class GoodputPass(StepPass):
    """One pass: work that finishes requests goes first, then the work of the served ones."""

    served: Sequence[Request] = ()  # see Plan
    others: Sequence[Request] = ()  # see Plan
    given_up: frozenset[str] = frozenset()  # ids of requests that this pass ends
    shares: RankShares | None = None
    _held: set[int] = field(default_factory=set)  # ranks that finish a request next, see `_finishing_rank`

    def _admit(self) -> list[Request]:
        """Requests that have made all of their steps, then served ones, of which new ones need memory. If requests that
        have begun and are not served take all memory, the one of them with the fewest steps left goes on to make room.
        """
        admitted, begun = list[Request](), list[Request]()
        for request in self.view.requests.running:
            if request.progress.steps_left:
                begun.append(request)
            elif request.id not in self.given_up:
                admitted.append(request)
                self._held |= self._finishing_rank(request)
        admitted += [each for each in self.others if each.status is Status.WAITING]
        room, num_done = self.view.config.max_num_seqs - len(begun), len(admitted)
        for request in self.served:
            if not request.is_live or not request.progress.steps_left:
                continue
            if request.status is Status.WAITING:
                if not self.view.may_begin(request):
                    continue
                room -= 1
                if room < 0:
                    continue
            admitted.append(request)
        if room < 0 and len(admitted) == num_done:
            others = [each for each in begun if each.id not in self.given_up]
            admitted += sorted(others, key=lambda request: (request.progress.steps_left, request.id))[:1]
        return admitted

    def _finishing_rank(self, request: Request) -> set[int]:
        """The rank that makes a request's last step, if its picture is decoded there, too. The rank is kept free for
        the decode: that can be sent only when the step's result has arrived, and other work sent meanwhile would go
        first and take longer than result and plan take to travel.
        """
        progress = request.progress
        ranks = self._ranks_of(request, request.workflow.last_output)
        is_next = set(request.sent_to.values()) == {ranks} and not (progress.is_ending or progress.is_restarting)
        return set(ranks) if is_next else set()

    def _can_run(self, request: Request, node: Node) -> bool:
        if self._held and request.progress.steps_left and not self._held.isdisjoint(self._ranks_of(request, node)):
            return False
        return StepPass._can_run(self, request, node)

    def _can_prime(self, job: CacheJob) -> bool:
        return self._rank_of(job) not in self._held and StepPass._can_prime(self, job)

    def _rank(self, request: Request, node: Node) -> int:
        if self.shares is not None:
            return self.shares.rank(self.view, request, node)
        return self._rank_apart(request, node)

    def _choose_nodes(self, request: Request, nodes: Sequence[Node]) -> None:
        """Choose nodes of a request, without a budget if it has a due time: its slot was planned with their time."""
        if due(request.head) is None:
            StepPass._choose_nodes(self, request, nodes)
            return
        for node in nodes:
            self._add([(request, node)])
