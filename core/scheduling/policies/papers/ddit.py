"""ddit: every request has a group of ranks, which grows between its steps (DDiT, sections 4.2.3, 4.3 and appendix B).

A baseline to compare with; `default` serves faster. In order of arrival, each request starts on as many ranks as are
free, at most its useful degree B. A request with fewer ranks is hungry: hungry requests get the ranks that become free
before any waiting request does, and the one that has lost most time goes first (equation 5). After its last step a
request keeps only its lowest rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.handles import RankIds
from core.messages.worker import Batch, BatchResult
from core.scheduling.dispatch import Decision
from core.scheduling.policies.buddies import Buddies, power_of_two
from core.scheduling.policies.papers.group_pass import GroupPass
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.policies.step_speeds import StepSpeeds
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View


class Ddit(SchedulingPolicy):
    """Keeps each request's group from its start until its end.

    promotes: whether groups grow; if not, requests stay on the ranks on which they have started.
    """

    spreads_models = False

    def __init__(self, *, promotes: bool = True) -> None:
        self._promotes = promotes
        self._speeds = StepSpeeds()
        self._groups: dict[str, RankIds] = {}  # request id -> its ranks
        self._wanted: dict[str, tuple[int, float]] = {}  # hungry request -> (B, seconds of a step on B ranks)
        self._starved: dict[str, float] = {}  # hungry request -> seconds lost by having fewer ranks, equation 5

    def on_result(self, batch: Batch, result: BatchResult) -> None:
        for item in batch.items:
            wanted = self._wanted.get(item.request_id)
            if wanted is not None:
                self._starved[item.request_id] += result.seconds - wanted[1]

    def on_end(self, request_id: str) -> None:
        self._groups.pop(request_id, None)
        self._forget_hunger(request_id)

    def _forget_hunger(self, request_id: str) -> None:
        self._wanted.pop(request_id, None)
        self._starved.pop(request_id, None)

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        self._groups = {name: ranks for name, ranks in self._groups.items() if set(ranks) <= set(view.ranks)}
        buddies = Buddies(view.ranks)
        for name, ranks in self._groups.items():
            buddies.hold(ranks)
            self._scale_down(buddies, view.requests[name])
        if self._promotes and buddies.num_free:
            self._promote(buddies)
        if buddies.num_free:
            self._start(view, buddies)
        admitted = [request for name in self._groups if (request := view.requests[name]).is_live]
        return GroupPass(view, groups=self._groups, admitted=admitted).run()

    def _scale_down(self, buddies: Buddies, request: Request) -> None:
        """Reduce the group of a request that has done all of its steps to its lowest rank."""
        ranks, progress = self._groups[request.id], request.progress
        if len(ranks) > 1 and progress.steps_done and not progress.steps_left and not _has_steps_in_flight(request):
            buddies.give(ranks[1:])
            self._groups[request.id] = ranks[:1]  # while this dict is iterated: its keys stay
            self._forget_hunger(request.id)

    def _promote(self, buddies: Buddies) -> None:
        """Give free ranks to hungry requests. A step in flight ends on the ranks that it was sent to."""
        for name in sorted(self._wanted, key=lambda name: -self._starved[name]):
            ranks, degree = self._groups.get(name, ()), self._wanted[name][0]
            while degree > len(ranks) > 0:
                larger = take_around(buddies, ranks, degree)
                if larger is not None:
                    self._groups[name] = larger
                    break
                degree //= 2
            if len(self._groups.get(name, ())) == self._wanted[name][0]:
                self._forget_hunger(name)

    def _start(self, view: View, buddies: Buddies) -> None:
        """Give groups to requests that have none, the most urgent first."""
        for request in self._without_group(view):
            speeds = self._speeds.of(view, request)
            degree = min(speeds.useful, power_of_two(len(view.ranks))) if request.progress.steps_left else 1
            taken = buddies.take_at_most(degree)
            if taken is None:
                return
            self._groups[request.id] = taken
            self._forget_hunger(request.id)
            if len(taken) < degree:
                self._wanted[request.id], self._starved[request.id] = (degree, speeds.seconds[degree]), 0.0

    def _without_group(self, view: View) -> Iterator[Request]:
        """Requests that are to get a group: running ones whose ranks have died, then waiting ones while there are
        slots. A request that runs alone waits until no other has a group.
        """
        running = view.requests.running
        yield from (request for request in running if request.id not in self._groups)
        if any(view.requests[name].runs_alone for name in self._groups):
            return
        for request in view.requests.live():
            if len(self._groups) >= view.config.max_num_seqs or (request.runs_alone and self._groups):
                return
            if request.status is Status.WAITING and request.id not in self._groups and view.may_begin(request):
                yield request
            if request.runs_alone:
                return


def _has_steps_in_flight(request: Request) -> bool:
    return any(name in request.progress.in_flight for name in request.workflow.step_names)


def take_around(buddies: Buddies, ranks: RankIds, size: int) -> RankIds | None:
    """Exchange a held set for the set of `size` ranks that contains it; None if any other rank of that is not free."""
    first = ranks[0] & -size
    if not buddies.are_free({*range(first, first + size)}.difference(ranks)):
        return None
    buddies.give(ranks)
    return buddies.take_this(first, size)
