"""LanePass: the work that the policy default chooses in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from core.graph.workflow import Node, op_of
from core.handles import RankIds
from core.scheduling.dispatch import AskAgain, Decision, Dispatch
from core.scheduling.node_cache import CacheJob
from core.scheduling.policies.planner.plan import Plan, has_steps
from core.scheduling.policies.planner.predictions import Predictions
from core.scheduling.policies.planner.repeated_steps import WholePass
from core.scheduling.policies.planner.step_homes import StepHomes
from core.scheduling.policies.step_pass import StepPass
from core.scheduling.requests.deadlines import due
from core.scheduling.requests.request import Request, Status

WORTH_A_RANK = 0.1
"""ControlNets get a rank beside that of their step if it saves at least this share of the time of both."""


@dataclass(slots=True)
class LanePass(StepPass):
    """Large requests have groups of ranks, small ones share steps on the ranks that are their homes."""

    apart: frozenset[str] = frozenset()  # ids of the large requests
    place: StepHomes = field(default_factory=StepHomes)
    predictions: Predictions = field(default_factory=Predictions)
    lanes: RankIds = ()  # ranks where small requests make steps; at least one, unless there are none
    groups: Mapping[str, RankIds] = field(default_factory=dict)  # large request that may be given work -> its ranks
    large: Sequence[Request] = ()  # the requests of `groups`, the most urgent first
    plan: Plan = field(default_factory=Plan)  # which small requests are served
    _held: set[int] = field(default_factory=set)  # ranks that finish a request next, see `_finishing_ranks`

    def _admit(self) -> list[Request]:
        """Large requests that have an open rank, or may get one for a ControlNet, and small ones, which get homes here,
        before anything depends on how many are at home where.
        """
        room = self.view.config.max_num_seqs - sum(map(_has_slot, self.view.requests.running))
        large = list[Request]()
        for request in self.large:
            if request.status is Status.WAITING:
                if room <= 0:
                    continue
                room -= 1
            if not self.view.open_ranks.isdisjoint(self.groups[request.id]) or self._may_have_rank_beside(request):
                large.append(request)
        if not self.lanes:
            return large + [each for each in self._without_steps() if each.stands_still]
        small = self._admit_planned(room)
        for request in small:
            self._last_home(request)
        self._held.update(rank for request in small for rank in self._finishing_ranks(request))
        return large + small

    def _finishing_ranks(self, request: Request) -> RankIds:
        """The rank that makes a small request's last step, if it has a due time and its picture is decoded there, too.
        The rank is kept free for the decode: that can be sent only when the step's result has arrived, and other work
        sent meanwhile would go first and take longer than result and plan take to travel.
        """
        progress, last = request.progress, request.workflow.last_output
        if due(request.head) is None or progress.steps_left or not request.sent_to or op_of(last).has_own_ports:
            return ()
        is_over = progress.is_ending or progress.is_restarting
        steps = {ranks for (name, _), ranks in request.sent_to.items() if name in request.workflow.step_names}
        return () if is_over or steps != {self._ranks_of(request, last)} else next(iter(steps))

    def _can_run(self, request: Request, node: Node) -> bool:
        is_kept = self._held and has_steps(request) and not op_of(node).has_own_ports
        is_held = is_kept and not self._held.isdisjoint(self._ranks_of(request, node))
        return not is_held and StepPass._can_run(self, request, node)

    def _can_prime(self, job: CacheJob) -> bool:
        return self._rank_of(job) not in self._held and StepPass._can_prime(self, job)

    def _admit_planned(self, room: int) -> list[Request]:
        """Requests that have no steps to make now, then served ones, but for those that have nothing to do with the
        open ranks. room: for so many that have not begun.
        """
        admitted, closed = self._without_steps(), frozenset(self.lanes) - self.view.open_ranks
        for rank, served in ((None, self.plan.others), *self.plan.served_on):
            for request in served:
                if rank in closed and self._is_elsewhere(request, rank):
                    continue
                if request.status is Status.WAITING:
                    if room <= 0 or not self.view.may_begin(request):
                        continue
                    room -= 1
                elif not has_steps(request):
                    continue
                admitted.append(request)
        return admitted

    def _without_steps(self) -> list[Request]:
        """Running requests that have no steps to make now, of the large ones those that stand still: these have no
        groups.
        """
        ended = self.plan.ended
        running = (
            each
            for each in self.view.requests.running
            if each.id not in (self.groups if each.stands_still else self.apart)
        )
        return [each for each in running if not has_steps(each) and each.id not in ended]

    def _is_elsewhere(self, request: Request, rank: int | None) -> bool:
        """Whether nothing of a served request could go to the open ranks, so that a pass need not look at it: all of it
        goes to this rank, its home, which has all that it needs and is not open.
        """
        if request.has_lost_rank or request.progress.pending or not self.view.open_ranks.isdisjoint(request.ranks):
            return False
        home = self.place.of(request)
        return home is not None and home == rank and self.view.has_all(home, request.needs)

    def _choose_step(self) -> Mapping[int, int]:
        """The steps of served requests. Where a rank would have nothing to do, because these wait for pages or memory
        that others hold, one that has begun goes on; a large one, or a served one that has no lane, if nothing else
        is done anywhere.
        """
        tokens = dict(StepPass._choose_step(self))
        idle = {rank for rank in self.view.idle_ranks if not self._has_work(rank)}
        if not idle:
            return tokens
        served = {request.id for request, _ in self._candidates} | self.plan.ended
        running = self.view.requests.running
        is_moving = any(each.num_moving for each in running) or next(self._fetches(), None) is not None
        is_busy = len(idle) < len(self.view.ranks) or is_moving
        if is_busy:
            served |= self.apart
        if is_busy or self.lanes:
            served.update(each.id for each in self.plan.served)
        for request in running:
            if not has_steps(request) or request.id in served:
                continue
            for node in self.view.ready(request):
                ranks, sizes = self._ranks_of(request, node), request.sizes(node)
                if not idle.issuperset(ranks):
                    continue
                if self._can_run(request, node):
                    self._add([(request, node)])
                    idle.difference_update(ranks)
                    if node.name in request.workflow.step_names:
                        tokens |= dict.fromkeys(ranks, sizes.num_step_tokens * sizes.num_rows)
                else:
                    self._candidates.append((request, [node]))  # its inputs may have to be fetched
        return tokens

    def run_whole(self) -> WholePass:
        """All that is chosen, and what is left."""
        decisions = self.run()
        given = (item for each in decisions if isinstance(each, Dispatch) for item in each.items)
        chosen = {(request.id, node.name) for request, node in given}
        left = [
            (request, node)
            for request, ready in self._candidates
            for node in ready
            if (request.id, node.name) not in chosen
        ]
        later = [self._ranks_of(request, node) for request, node in left if self._is_for_later(request, node)]
        others = {each.id for each in self.plan.others if each.status is Status.WAITING and each.is_live}
        is_all = len(later) == len(left) and others <= {name for name, _ in chosen}
        return WholePass(decisions, is_all, frozenset(rank for ranks in later for rank in ranks))

    def _is_for_later(self, request: Request, node: Node) -> bool:
        """Whether a node is for ranks of which some are not open, whichever others are."""
        goes_where_open = op_of(node).has_own_ports or op_of(node).serves_step
        return not goes_where_open and not self.view.open_ranks.issuperset(self._ranks_of(request, node))

    def run(self) -> list[Decision]:
        """All that is chosen. But of a rank that makes no steps while others do, only the batch that takes least time:
        what comes meanwhile joins those that wait.
        """
        decisions = [*StepPass.run(self), *self._asks_again()]
        given = [each.ranks[0] for each in decisions if isinstance(each, Dispatch)]
        if len({*given}) == len(given):
            return decisions
        making_steps = {home for each in self.plan.served if (home := self.place.of(each)) is not None}
        if not making_steps:
            return decisions
        making_steps |= self._grouped
        dispatches = (each for each in decisions if isinstance(each, Dispatch) and each.ranks[0] not in making_steps)
        others = [each for each in dispatches if not op_of(each.items[0][1]).has_own_ports]
        first: dict[int, Dispatch] = {}
        for each in sorted(others, key=self._seconds):
            first.setdefault(each.ranks[0], each)
        put_off = {id(each) for each in others} - {id(each) for each in first.values()}
        return [each for each in decisions if id(each) not in put_off]

    def _seconds(self, batch: Dispatch) -> float:
        """Predicted time of a batch whose items run one after the other."""
        return sum(self.view.seconds(request, node) for request, node in batch.items)

    # ------------------------------------------------------------------------------------------------ ranks

    @property
    def _grouped(self) -> set[int]:
        """The ranks of the groups."""
        return {rank for group in self.groups.values() for rank in group}

    def _ranks(self, request: Request, node: Node) -> RankIds:
        group = self.groups.get(request.id)
        is_shared = group is not None and len(group) > 1 and self.view.has_components(request, node, group)
        if op_of(node).serves_step and not is_shared:
            return (self._rank_beside(request, node),)
        if node.name not in request.workflow.step_names or self._device(request, node) is not None:
            return (self._rank(request, node),)
        return StepPass._ranks(self, request, node) if group is None else group

    def _rank_among(self, request: Request, node: Node, ranks: RankIds) -> int:
        """For a large request the first rank of its group, for a small one its home. Where others are at home with it,
        pictures are decoded on a rank where nobody is. One that stands still has its home where its values are.
        """
        if request.id in self.groups:
            first = self.groups[request.id][0]
            return first if first in ranks else ranks[0]
        if node.name in request.workflow.step_names:
            return self._home(request, node, ranks)
        home = self._last_home(request)
        if node.name in request.workflow.after_rounds and (home in self.lanes or not request.stands_still):
            return self._spare(ranks, home)
        return home if home in ranks else ranks[0]

    def _rank_beside(self, request: Request, node: Node) -> int:
        """The rank that computes ControlNets for a request's next step. If that pays, it is an open one beside the
        request's own, on which nobody makes steps; where their last round has not ended, that one's rank, although it
        may not be open: they cannot begin before.
        """
        ranks, device = self.view.ranks_with(request.keys_of(node)), self.view.page_rank(request)
        group = self.groups.get(request.id) or (self._last_home(request),)
        own = group[0] if device is None else device
        if device is None and self.view.config.degree == 1 and self._is_worth_a_rank(request, node):
            number = self.place.num_on(ranks)
            free = self.view.open_ranks.union(*request.ranks_running(node)) - self._grouped - {own}
            own = next((rank for rank in ranks if rank in free and not number[rank]), own)
        return own if own in ranks else ranks[0]

    def _may_have_rank_beside(self, request: Request) -> bool:
        """Whether ControlNets of a large request may run beside its next step, while the rank of its steps is busy."""
        is_alone = len(self.groups[request.id]) == 1
        return is_alone and any(op_of(node).serves_step for node in self.view.ready(request))

    def _asks_again(self) -> Iterator[AskAgain]:
        """For ControlNets that would have to wait too long on their ranks for the step before, were they sent now."""
        for request, ready in self._candidates if len(self.view.ranks) > 1 else ():
            for node in ready:
                if op_of(node).serves_step and self.view.open_ranks.issuperset(ranks := self._ranks_of(request, node)):
                    seconds = self.view.seconds_until_sent(request, node, ranks)
                    if 0 < seconds < inf:
                        yield AskAgain(seconds)

    def _is_worth_a_rank(self, request: Request, node: Node) -> bool:
        """See WORTH_A_RANK. Unknown times are worth none."""
        assert request.step_node is not None, "ControlNets work for steps"
        seconds = [self.view.seconds(request, each) for each in (node, request.step_node)]
        return 0 < WORTH_A_RANK * sum(seconds) <= min(seconds)

    def _home(self, request: Request, node: Node, ranks: RankIds) -> int:
        """The rank of a small request's steps; it is chosen when the request needs it first, or cannot keep it."""
        keys = request.keys_of(node)
        home = self.place.find(request, keys)
        if home is None or home not in self.lanes or home not in ranks:
            able = [rank for rank in self.lanes if rank in ranks] or ranks
            if home is None or home not in able:
                home = self.place.place(request, keys, able, self.predictions.of(self.view, request).cost)
        return home

    def _last_home(self, request: Request) -> int:
        """The home of a request's next steps, or its last ones. If it stands still, that is where the last one was
        made, also of a large request.
        """
        if request.stands_still and request.step_ranks:
            return request.step_ranks[0]
        node = request.step_node
        if node is None:
            return self.lanes[0] if self.lanes else self.view.ranks[0]
        return self._home(request, node, self.view.ranks_with(request.keys_of(node)))

    def _spare(self, ranks: RankIds, home: int) -> int:
        """The last of these ranks that makes no steps; else the last without requests, if others are at home where this
        one is; else its home.
        """
        grouped = self._grouped
        free = [rank for rank in ranks if rank not in grouped]
        if beside := [rank for rank in free if rank not in self.lanes]:
            return beside[-1]
        number = self.place.num_on((*free, home))
        idle = [rank for rank in free if not number[rank]]
        if idle and (home not in ranks or number[home] > 1):
            return idle[-1]
        return home if home in ranks else ranks[-1]

    def _choose_nodes(self, request: Request, nodes: Sequence[Node]) -> None:
        """Choose nodes of a request, without a budget if its slot was planned with their time."""
        if due(request.head) is None:
            StepPass._choose_nodes(self, request, nodes)
            return
        for node in nodes:
            self._add([(request, node)])


def _has_slot(request: Request) -> bool:
    """Whether a running request counts among those that may run together: until its last step, or if users' classes run
    it until its end, because the values between its nodes may be large. It has none while it waits for adapters.
    """
    return (request.progress.steps_left > 0 and not request.stands_still) or request.workflow.has_own_ports
