"""Predictions: what is known of each request's speed: how long its steps take on how many ranks, and its other work."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

from core.graph.workflow import op_of
from core.handles import RankIds
from core.scheduling.policies.step_speeds import Speeds, StepCost, StepSpeeds
from core.scheduling.requests.request import Request, Status
from core.scheduling.requests.work_left import WorkLeft
from core.scheduling.view import View

OVERTAKEN = 1.5
"""Shorter requests overtake a longer one if they arrive after it by at most this many times the seconds that all ranks
together would need for its remaining work.
"""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted of one request."""

    seconds: Mapping[int, float]  # degree -> seconds of a step, without its ControlNets
    whole: Mapping[int, float]  # the same with them
    least_step: float  # the least of these
    is_small: bool  # it shares steps with others on one rank
    cost: StepCost
    before: float  # seconds of other work before the steps
    after: float  # seconds of other work after the steps

    def largest_degree(self, share: float) -> int:
        """The largest degree at which each rank does at least this share of what one rank alone does."""
        return max(degree for degree, of_step in self.whole.items() if degree * of_step * share <= self.whole[1])

    def other_seconds(self, request: Request) -> float:
        """Seconds of its remaining work besides steps."""
        return self.before + self.after if request.status is Status.WAITING else self.after

    def work(self, request: Request) -> float:
        """Seconds of its remaining work on one rank, of steps that it shares what it adds."""
        of_step = self.cost.extra if self.is_small else self.seconds[1]
        return self.other_seconds(request) + request.progress.steps_left * of_step

    def alone(self, request: Request, work: WorkLeft) -> float:
        """Seconds of its remaining work if it had all ranks. work: this, on one."""
        if len(self.seconds) == 1:
            return work.alone
        return work.before + request.progress.steps_left * self.least_step + work.after

    def place_in_line(self, request: Request, steps: int, num_ranks: int) -> float:
        """The sort key of a request, lowest first, in seconds; see OVERTAKEN. steps: its remaining steps."""
        work = self.other_seconds(request) + steps * self.seconds[1]
        return request.head.arrival + OVERTAKEN * work / num_ranks


class Predictions:
    """The predictions of the live requests of one policy."""

    def __init__(self) -> None:
        self._speeds = StepSpeeds()
        self._known: dict[str, tuple[Hashable, Prediction]] = {}  # request id -> (what `_seen_of` it, what follows)
        self._made_of: tuple[int, RankIds, int] = 0, (), 0  # predictions of the view, live ranks, and what they had

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._known.pop(request_id, None)

    def of(self, view: View, request: Request) -> Prediction:
        """The prediction for a live request, kept until something changes that it was made of."""
        if (view.predictions, view.ranks, view.residency_version) != self._made_of:
            self._made_of = view.predictions, view.ranks, view.residency_version
            self._known.clear()
        seen, found = _seen_of(request), self._known.get(request.id)
        if found is None or found[0] != seen:
            made = _prediction(view, request, self._speeds.of(view, request))
            found = self._known[request.id] = seen, made
        return found[1]


def _seen_of(request: Request) -> Hashable:
    """What may change of a live request that a prediction is made of: its steps' size goes with their node, and with
    the mask that it has found.
    """
    node = request.step_node
    return request.runs_on_one_rank, node and node.name, request.active_tokens


def _prediction(view: View, request: Request, speeds: Speeds) -> Prediction:
    work, num_ranks = view.work_left(request), len(able_ranks(view, request) or view.ranks)
    seconds = {degree: of_step for degree, of_step in speeds.seconds.items() if degree <= num_ranks}
    beside = _seconds_beside(view, request, seconds)
    whole = {degree: of_step + beside[degree] for degree, of_step in seconds.items()}
    is_small = num_ranks == 1 or _is_small(view, request, speeds)
    return Prediction(seconds, whole, min(whole.values()), is_small, speeds.cost, work.before, work.after)


def _is_small(view: View, request: Request, speeds: Speeds) -> bool:
    """Whether a request makes its steps on one rank together with others: it gains by that, or is mask-aware, or there
    is nothing else.
    """
    if view.config.degree > 1 or not request.workflow.steps:
        return True
    return speeds.is_small or (speeds.useful == 1 and request.spec.is_mask_aware)


def _seconds_beside(view: View, request: Request, degrees: Collection[int]) -> dict[int, float]:
    """Degree -> seconds of what works for a step, its ControlNets, on so many ranks; where that was not seen, what most
    took.
    """
    step, found = request.step_node, dict.fromkeys(degrees, 0.0)
    for node in request.workflow.nodes_of(step.region) if step is not None else ():
        if op_of(node).serves_step:
            seen = {degree: view.seconds(request, node, degree) for degree in degrees}
            for degree, seconds in seen.items():
                found[degree] += seconds or max(seen.values())
    return found


def able_ranks(view: View, request: Request) -> RankIds:
    """The ranks that have the model of a request's next steps, ascending; (): all have it, or none."""
    keys = request.denoiser
    having = () if keys is None else view.ranks_with(keys)
    return () if len(having) == len(view.ranks) else tuple(sorted(having))
