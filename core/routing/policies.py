"""Routing policies: choose the engine for an edit from the state of the fleet.

A policy is a pure function of the edit, the fleet and the time. Ties go to the engine used least recently.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from core.config import PRIME_SHARE, RouterPolicy
from core.errors import EngineDeadError
from core.routing.admission import Outlook
from core.routing.fleet import TINY, EngineSlots, Fleet
from core.routing.fleet_costs import SizeCosts, Vector
from core.routing.model_map import NOTHING, LoadWait
from core.routing.request_shape import RequestShape
from core.routing.template_map import TemplatePages

TIE = 1e-9
"""Relative difference up to which costs count as equal."""

Matrix = npt.NDArray[np.float64]


class Route(NamedTuple):
    """The result of a policy."""

    engine: int
    predicted_seconds: float | None = None  # until the request is done there; None if the policy does not predict it


class RoutingPolicy(Protocol):
    def choose(self, shape: RequestShape, fleet: Fleet, now: float) -> Route:
        """Raises EngineDeadError if no engine is alive that serves its model."""
        ...


class EngineTimes(NamedTuple):
    """Predicted seconds if the request goes to an engine now, float64 [engines] each."""

    finish: Vector  # until it is done
    imposed: Vector  # delay of the requests that the engine holds, summed over them
    priming: Vector  # worker time spent on its template's pages
    loading: Vector  # delay of later requests by what is loaded for it, see `_loading`


def predict_times(shape: RequestShape, fleet: Fleet, now: float) -> EngineTimes:
    """Predict the request's times on each engine.

    It waits for a slot, which is in a lane of the engine, is encoded, waits for weights and pages (a load runs beside
    the others' steps, priming takes a share of each) and then makes its steps together with the requests left in that
    lane. A step takes base + sum of step seconds, so s steps beside others with S_i left, at C_i each, take s * (base +
    c) + sum min(s, S_i) * C_i. On another machine it comes when its arrays are there, and its results are copied back.
    """
    costs, step = fleet.size_costs(shape), fleet.step_seconds_on(shape)
    slots, copying = fleet.slots_for(shape), fleet.copy_seconds(shape)
    since_free = now + copying.there - slots.free_at
    idle = np.maximum(since_free, 0.0)
    wait = idle - since_free
    # It is encoded beside a step; before that, half of the running one passes, unless a slot is only free at its end.
    lead = slots.pace + np.minimum(0.5 * slots.pace, idle)
    pages = fleet.pages(shape)
    if pages is not None:
        lead = np.maximum(lead, pages.loads_first * costs.load - wait)  # a load has the time in the queue to itself
    load = fleet.load_wait(shape, now)
    if load is not None:
        lead = np.maximum(lead, load.seconds - wait)
    steps = _after(slots.steps, (idle + lead) / slots.pace)
    base = np.maximum(costs.base, fleet.base_seconds)
    finish, own, beside = copying.there + wait + lead, NOTHING, fleet.priming_seconds
    if pages is not None:
        priming = _priming(shape, fleet, slots, pages, steps, costs, base)
        finish, own, beside = finish + priming.before, priming.own, priming.beside
        steps = _after(steps, priming.rounds)
    shared = np.minimum(steps, float(shape.num_steps))
    making = shape.num_steps * (base + step) + np.add.reduce(shared * slots.seconds)
    alone = own + (costs.other if shape.num_steps else 0.0)
    finish += alone - own + making + np.minimum(beside, PRIME_SHARE * making)
    imposed = step * np.add.reduce(shared) + alone * slots.num_placed
    if load is None:
        return EngineTimes(finish + copying.back, imposed, own, NOTHING)
    if load.dropping is not None and load.dropping.waits.any():
        other_loads = load.seconds - load.own  # until they end, which may have waited for the same requests
        loaded = np.maximum(fleet.drain_seconds(slots, now), other_loads) + load.own
        finish = np.where(load.dropping.waits, loaded + alone + shape.num_steps * (base + step), finish)
    return EngineTimes(finish + copying.back, imposed, own, _loading(load, fleet))


def _loading(load: LoadWait, fleet: Fleet) -> Vector:
    """Delay of later requests, summed over them, by a load that the request would start, float64 [engines].

    It should wait for another engine that loads the same already. What is dropped for it has to be loaded again, for
    which its next request waits. It was last used some time ago, and so is asked for about once in such a time: those
    that come during both loads wait, too, but no more in each than a lane holds. Both loads are assumed to take as
    long.
    """
    if load.dropping is None:
        return load.repeated
    drops, unused, _ = load.dropping
    waiting = np.minimum(1.0 + (2.0 * load.own) / unused, max(1.0, 2.0 * fleet.mean_held))
    return load.repeated + load.own * waiting * drops


class PrimingTimes(NamedTuple):
    """Predicted priming on each engine, float64 [engines] each; seconds except for `rounds`."""

    own: Vector  # work on the request's own template
    before: Vector  # until the request can begin
    rounds: Vector  # steps that the others make before that
    beside: Vector  # work done beside its steps


def _priming(
    shape: RequestShape,
    fleet: Fleet,
    slots: EngineSlots,
    pages: TemplatePages,
    steps: Matrix,
    costs: SizeCosts,
    base: Vector,
) -> PrimingTimes:
    """Jobs are primed one after the other, in a share of each step's time, or at full speed where no steps are made."""
    own_first, later = pages.prime_first * costs.prime + pages.is_new * costs.template, pages.prime_later * costs.prime
    if not shape.num_steps:
        own_first += later
        later = np.zeros_like(later)
    first = (fleet.priming_seconds + own_first) * pages.is_missing
    rounds = first / (PRIME_SHARE * np.maximum(slots.pace - fleet.base_seconds, TINY))
    stepping = np.minimum(steps, rounds)
    stepping *= slots.seconds
    before = first + np.add.reduce(stepping) + np.minimum(steps[0], rounds) * base
    own = own_first + later
    return PrimingTimes(own, before, rounds, fleet.priming_seconds + own - first)


class RoundRobin:
    """Each engine in turn."""

    def choose(self, shape: RequestShape, fleet: Fleet, now: float) -> Route:
        return Route(cheapest(np.zeros(fleet.num_engines), fleet))


class LeastRequests:
    """The engine with the fewest requests (FlashPS, section 6.5: request-granularity load balance)."""

    def choose(self, shape: RequestShape, fleet: Fleet, now: float) -> Route:
        return Route(cheapest(fleet.num_requests, fleet))


class LeastTokens:
    """The engine with the fewest tokens in a step of all its requests (FlashPS, section 6.5: token-granularity).

    Engines report seconds, which stand for tokens, since all engines have the same cost per token.
    """

    def choose(self, shape: RequestShape, fleet: Fleet, now: float) -> Route:
        return Route(cheapest(fleet.held_seconds, fleet))


class BatchCost:
    """FlashPS, Algorithm 2 as printed: among the engines with slack in their running batch, the one where a step of
    that batch with the request added is cheapest.

    The paper does not define the case without slack anywhere. Here all engines are then candidates, and all requests of
    an engine count as one batch.
    """

    def choose(self, shape: RequestShape, fleet: Fleet, now: float) -> Route:
        base = np.maximum(fleet.size_costs(shape).base, fleet.base_seconds)
        batch_seconds = base + fleet.held_seconds + fleet.step_seconds(shape)
        has_slack = (fleet.num_requests < fleet.max_num_seqs) & fleet.is_alive
        return Route(cheapest(np.where(has_slack | ~has_slack.any(), batch_seconds, np.inf), fleet))


class MaskAware:
    """The engine where the request adds least to the sum of all latencies: its own time until it is done, the delay of
    the requests already there, and the delay of later ones.

    Later requests are delayed by work that another engine would not have to do: a second of it delays as many requests
    as an engine holds on average (Little's law). Only priming differs between engines in that way, so a template's
    edits gather where its pages are, as long as that pays.
    """

    def choose(self, shape: RequestShape, fleet: Fleet, now: float) -> Route:
        ahead = predict_times(shape, fleet, now)
        costs = ahead.finish + ahead.imposed + fleet.mean_held * ahead.priming + ahead.loading
        engine = cheapest(costs, fleet)
        return Route(engine, float(ahead.finish[engine]) if fleet.costs.is_known(shape.model) else None)


_POLICIES: dict[RouterPolicy, type[RoutingPolicy]] = {
    "round-robin": RoundRobin,
    "least-requests": LeastRequests,
    "least-tokens": LeastTokens,
    "batch-cost": BatchCost,
    "mask-aware": MaskAware,
}


def make_policy(name: RouterPolicy) -> RoutingPolicy:
    return _POLICIES[name]()


def cheapest(costs: Vector, fleet: Fleet) -> int:
    """The living engine of least cost, among equals the one used least recently. Raises EngineDeadError if none is
    alive.
    """
    if not fleet.num_alive:
        raise EngineDeadError("No engine is alive.")
    costs = costs + fleet.death
    best = int(costs.argmin())
    equals = (costs <= float(costs[best]) * (1 + TIE)).nonzero()[0]
    return best if len(equals) == 1 else int(equals[fleet.last_sent[equals].argmin()])


def _after(steps: Matrix, passed: Vector) -> Matrix:
    """Steps left, shape [slots, engines], after `passed` steps of each engine."""
    left: Matrix = steps - passed
    np.maximum(left, 0.0, out=left)
    return left


def outlook(shape: RequestShape, fleet: Fleet, policy: RoutingPolicy, now: float) -> Outlook | None:
    """The prediction for an edit on the engine that the policy chooses; None before any engine has reported costs.
    Raises EngineDeadError if no engine is alive that serves its model.
    """
    if not fleet.costs.is_known(shape.model):
        return None
    fleet = fleet.before(shape.priority, now, shape.owner).serving(shape.model, now)
    engine = policy.choose(shape, fleet, now).engine
    costs = fleet.size_costs(shape)
    alone = costs.other + shape.num_steps * (costs.base + float(np.min(fleet.step_seconds_on(shape))))
    seconds, load = float(predict_times(shape, fleet, now).finish[engine]), fleet.load_wait(shape, now)
    starts_load = load is not None and bool(load.is_first[fleet.is_alive].all())
    return Outlook(seconds, alone, not fleet.num_requests[engine], starts_load)


def work_seconds(shape: RequestShape, fleet: Fleet) -> float:
    """Time of a rank that an edit takes while batches are full."""
    costs = fleet.size_costs(shape)
    return costs.other + shape.num_steps * (costs.base / fleet.max_num_seqs + fleet.step_seconds(shape))
