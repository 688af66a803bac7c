"""Fleet: the state of all engines as a router knows it, in arrays over engines, so that a decision is one expression.

An engine is modelled as a FIFO queue in front of `max_num_seqs` slots, spread over its lanes, which are ranks: the
requests of a lane advance together, step by step (`engine_lanes.py`). Its load reports keep a copy of its queue with
the remaining work of its requests; from it follow the time at which a slot is free for a new request, the lane that it
is in, and the work left in that lane at that time:

    free_at [engines]                 when a slot is free, in seconds of the caller's clock; in the past: since then
    steps, seconds [slots, engines]   steps left in each slot at `free_at`, most first, and seconds it adds to each step

Reports come when something changed, not at every step: in between, steps are assumed to pass at the predicted pace.
These are `EngineSlots`, computed only when they are read after a report: from the first MAX_SIMULATED requests of the
queue one by one, and from sums over the rest, which is assumed to leave the slots as it found them. Where a request may
have only some of an engine's lanes, because others lack its model, or has several, the lane is another one: such slots
are kept for each kind of request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from core.costs.load_report import LoadReport, RequestLoad
from core.costs.useful_degree import useful_degree
from core.handles import RankIds
from core.routing.engine_lanes import EngineLanes, Lane
from core.routing.engine_queue import EngineQueue, QueueRest
from core.routing.fleet_costs import FleetCosts, SizeCosts, TokensBeside, Vector
from core.routing.model_map import NOTHING, LoadWait, ModelMap
from core.routing.overtaking import staying_ahead
from core.routing.request_shape import RequestShape
from core.routing.template_map import Counts, TemplateMap, TemplatePages
from core.routing.weights import Weights

MAX_SIMULATED = 256
"""Requests of an engine's queue that are looked at one by one, besides one for each slot; as many as a server takes by
default. With several lanes it is so many fewer, because each is looked at for each request. Taking sums for the rest
shifts a prediction by less than the time of one request.
"""

MAX_KINDS = 64
"""Kinds of requests for which slots are kept."""

TINY = 1e-9
"""Seconds; keeps divisions by the step time of an idle engine finite."""


class EngineSlots(NamedTuple):
    """What is expected in the slots of one lane of each engine, when it takes a new request."""

    free_at: Vector  # when that is, in seconds of the caller's clock, shape [engines]
    pace: Vector  # seconds of a step of the requests in the slots, shape [engines]
    num_placed: Vector  # number of these requests, shape [engines]
    left: Vector  # seconds from then until all of them are done, if no other begins, shape [engines]
    steps: Vector  # steps left in each slot, most first, shape [slots, engines]
    seconds: Vector  # seconds that the request in each slot adds to a step, shape [slots, engines]


class CopySeconds(NamedTuple):
    """Seconds that a request's arrays take to each engine and back, shape [engines] or [1]."""

    there: Vector
    back: Vector


LaneKind = tuple[tuple[Weights, ...], int]
"""What decides the lanes of a request: the weights that it needs, if some lanes of an engine lack them, and the number
of lanes that it is in."""


ANY: LaneKind = (), 1
"""Of a request that may have any one lane."""


class _KnownSlots:
    """EngineSlots of one kind of request."""

    def __init__(self, rows: Vector, num_slots: int, stale: Iterable[int]) -> None:
        """rows: shape [4 + 2 * num_slots, engines]. stale: engines whose column is to be computed."""
        self.rows, self.stale, self._num_slots = rows, {*stale}, num_slots
        steps, seconds = rows[4 : 4 + num_slots], rows[4 + num_slots :]
        self.slots = EngineSlots(rows[0], rows[1], rows[2], rows[3], steps, seconds)

    @classmethod
    def empty(cls, num_slots: int, num_engines: int, stale: Iterable[int] = ()) -> _KnownSlots:
        made = cls(np.zeros((4 + 2 * num_slots, num_engines)), num_slots, stale)
        made.slots.pace[:] = TINY
        return made

    def copy(self) -> _KnownSlots:
        return _KnownSlots(self.rows.copy(), self._num_slots, self.stale)

    def set(self, engine: int, lane: Lane, base: float) -> None:
        left = lane.left()
        pace = max(base + sum([seconds for _, seconds in left]), TINY) if left else TINY
        padding = [0.0] * (self._num_slots - len(left))
        steps, seconds = [steps for steps, _ in left], [seconds for _, seconds in left]
        until_done = sum(map(mul, steps, seconds)) + base * max(steps, default=0.0)
        self.rows[:, engine] = [lane.time, pace, len(left), until_done, *steps, *padding, *seconds, *padding]


@dataclass(slots=True)
class PendingSend:
    """An edit or a template that was sent to an engine and is not in its last report yet."""

    number: int  # its number among all that were sent there, from 1
    load: RequestLoad | None  # None for a template
    base_seconds: float  # the constant part of its steps
    priming_seconds: float  # priming that it causes
    time: float  # when it was sent
    needed: tuple[Weights, ...]  # what is loaded for it
    drained: float  # when what the engine had before is done, if it lacks any of these; else 0


class Fleet:
    """Owned by one router. Times are seconds of one monotonic clock."""

    def __init__(self, num_engines: int, max_num_seqs: int, served: Sequence[Collection[str]] = ()) -> None:
        """served: names of the models that each engine serves; (): all serve all."""
        self.num_engines = num_engines
        self.max_num_seqs = max_num_seqs
        self.costs = FleetCosts()
        self.templates = TemplateMap(num_engines)
        self._models = ModelMap(num_engines, served)
        # Added to an engine's cost: 0, or infinity if it is no candidate: dead, or without a rank that lives.
        self.death: Vector = np.zeros(num_engines)
        self._lost: set[int] = set()  # engines that are dead
        self._closed: set[int] = set()  # engines that end once they have done what they have
        # Model -> engine -> until when it refuses it, seconds.
        self._refused: dict[str, dict[int, float]] = {}
        self.num_alive = num_engines
        self._stale: set[int] = set()  # engines whose lanes are to be computed from their last reports
        self._bind(np.zeros((4, num_engines)))
        self._ranks: list[RankIds] = [(0,)] * num_engines  # of each engine's lanes
        self._num_lanes = np.ones(num_engines, dtype=np.int64)
        self._num_alive_lanes: int | None = None  # of the candidates; computed when asked for
        self._lanes = [EngineLanes((0,), max_num_seqs, 0.0) for _ in range(num_engines)]
        self._known: dict[LaneKind, _KnownSlots] = {ANY: _KnownSlots.empty(max_num_seqs, num_engines)}
        self.last_sent: Counts = np.full(num_engines, -1.0)  # number of the last send there, counted over all engines
        self._byte_seconds: Vector = np.zeros(num_engines)  # of arrays that are copied there, each way
        self._num_held = 0.0
        self._num_sends = 0
        self._num_sent = [0] * num_engines  # since the engine was (re)started
        self._pending: list[list[PendingSend]] = [[] for _ in range(num_engines)]
        self._queues = [EngineQueue() for _ in range(num_engines)]
        self._reported = [0.0] * num_engines  # time of each engine's last report

    def _bind(self, rows: Vector) -> None:
        """Name the rows of one array, shape [engines] each; a column is the state of one engine."""
        self._rows = rows
        self.num_requests, self.held_seconds, self.base_seconds, self.priming_seconds = rows

    @property
    def slots(self) -> EngineSlots:
        """What is expected in the slots of all engines, their last reports included, for a request that may have any
        one lane; valid until the next event.
        """
        return self._slots_of_kind(ANY)

    def slots_for(self, shape: RequestShape) -> EngineSlots:
        """The same for this request."""
        needed = shape.needed if self._models.are_on_some_ranks(shape.needed) else ()
        return self._slots_of_kind((needed, self.degree(shape)))

    def _slots_of_kind(self, kind: LaneKind) -> EngineSlots:
        self.settle()
        if kind not in self._known:
            if len(self._known) > MAX_KINDS:
                for other in self._known.keys() - {ANY}:  # not of a copy of this fleet alone
                    del self._known[other]
            living = set(range(self.num_engines)) - self._lost  # dead ones are as empty as it is
            self._known[kind] = _KnownSlots.empty(self.max_num_seqs, self.num_engines, living)
        return self._refresh(kind)

    # ------------------------------------------------------------------------------------------------- events

    def observe(self, engine: int, report: LoadReport, now: float) -> None:
        """Update an engine's state from its report. Reports of dead engines are ignored."""
        if engine in self._lost:
            return
        self._set_death(engine, is_dead=not report.num_ranks or engine in self._closed)
        self._note_refused(engine, report.refused)
        if report.costs is not None:
            self.costs.observe(report.costs)
        for resident in report.resident_pages:
            self.templates.observe(engine, resident)
        pending = [sent for sent in self._pending[engine] if sent.number > report.num_received]
        self._pending[engine] = pending
        self._models.observe(engine, report, [(sent.needed, sent.time, sent.drained) for sent in pending], now)
        queue = self._queues[engine]
        queue.update(report)
        if not (pending or queue or report.priming_seconds):
            self.templates.clear_expected(engine)
        self._set_held(engine, report.num_running + report.num_waiting + len(pending))
        self.base_seconds[engine] = max([report.base_seconds, *(sent.base_seconds for sent in pending)])
        self.priming_seconds[engine] = report.priming_seconds + sum(sent.priming_seconds for sent in pending)
        self.held_seconds[engine] = queue.step_seconds + sum(sent.load.step_seconds for sent in pending if sent.load)
        self._reported[engine] = now
        self._ranks[engine] = report.lanes or self._ranks[engine]
        if len(self._ranks[engine]) != self._num_lanes[engine]:
            self._num_lanes[engine], self._num_alive_lanes = len(self._ranks[engine]), None
        self._stale.add(engine)

    def note_link(self, engine: int, byte_seconds: float) -> None:
        """Note that requests' arrays are copied to and from an engine. byte_seconds: for each byte."""
        self._byte_seconds[engine] = byte_seconds

    def settle(self) -> None:
        """Compute the slots of the engines that have reported since the last time; reading them does it too."""
        while self._stale:
            self._settle_engine(self._stale.pop())
        self._refresh(ANY)

    def sent(self, engine: int, shape: RequestShape, now: float) -> None:
        """Note what was just sent to an engine; it counts until the engine's own report includes it."""
        self.settle()
        self._num_sent[engine] += 1
        self.last_sent[engine] = self._num_sends
        self._num_sends += 1
        sent = self._make_sent(engine, shape, now)
        self._pending[engine].append(sent)
        self._models.send(engine, sent.needed, self._work(shape), sent.drained, now)
        self._set_held(engine, float(self.num_requests[engine]) + 1)
        self.priming_seconds[engine] += sent.priming_seconds
        if sent.load is not None:
            self.base_seconds[engine] = max(self.base_seconds[engine], sent.base_seconds)
            self.held_seconds[engine] += sent.load.step_seconds
            self._line_up(engine, sent.load, now)

    def forget_classes(self, names: Iterable[str]) -> None:
        """Forget what engines have reported of users' classes that no request runs any more."""
        for name in names:
            self.costs.forget(name)
            self._models.drop(Weights(name, "class"))

    def lose(self, engine: int) -> None:
        """Mark an engine as dead: it is no candidate any more and its state is cleared."""
        self._lost.add(engine)
        self._set_death(engine, is_dead=True)
        self._note_refused(engine, {})
        self.templates.forget(engine)
        self._models.forget(engine)
        self._pending[engine].clear()
        self._num_sent[engine] = 0
        self.last_sent[engine] = -1
        self._queues[engine].clear()
        self._reported[engine] = 0.0
        self._set_held(engine, 0)
        self.base_seconds[engine] = self.priming_seconds[engine] = 0.0
        self.held_seconds[engine] = 0.0
        self._stale.add(engine)

    def close(self, engine: int) -> None:
        """Mark an engine as one that ends once it has done what it has: it is no candidate any more."""
        self._closed.add(engine)
        self._set_death(engine, is_dead=True)

    def restore(self, engine: int) -> None:
        """Mark an engine that has started, for the first time or again, as alive and empty."""
        self._lost.discard(engine)
        self._closed.discard(engine)
        self._set_death(engine, is_dead=False)

    def has_lost(self, engine: int) -> bool:
        """Whether an engine is marked as dead."""
        return engine in self._lost

    def _set_death(self, engine: int, *, is_dead: bool) -> None:
        if is_dead == bool(self.death[engine]):
            return
        self.death[engine], self._num_alive_lanes = np.inf if is_dead else 0.0, None
        self.num_alive = int(self.is_alive.sum())

    @property
    def is_alive(self) -> npt.NDArray[np.bool_]:
        """Which engines are candidates, shape [engines]."""
        is_alive: npt.NDArray[np.bool_] = self.death == 0.0
        return is_alive

    def _note_refused(self, engine: int, refused: Mapping[str, float]) -> None:
        """Replace what an engine refuses. refused: model -> until when."""
        if refused or self._refused:
            for model in {*refused, *self._refused}:
                self._refused.setdefault(model, {}).pop(engine, None)
            for model, until in refused.items():
                self._refused[model][engine] = until
            self._refused = {model: engines for model, engines in self._refused.items() if engines}

    def serving(self, model: str, now: float) -> Fleet:
        """The fleet without the engines that do not serve a model, and without those that refuse it at the moment,
        unless all others do. "": any engine serves. Read-only.
        """
        if model not in self._refused and (not self._models.differs or not model):
            return self
        serving = self.is_alive & (self._models.bar(model) == 0.0)
        willing = serving.copy()
        willing[[engine for engine, until in self._refused.get(model, {}).items() if now < until]] = False
        others = willing if willing.any() else serving
        self.settle()
        fleet = copy(self)
        fleet.death, fleet._num_alive_lanes, fleet._stale = np.where(others, 0.0, np.inf), None, set()
        fleet.num_alive, fleet._num_held = int(others.sum()), float(self.num_requests[others].sum())
        return fleet

    def num_serving(self, model: str) -> int:
        """Living engines that serve a model."""
        return int(np.count_nonzero(self.death + self._models.bar(model) == 0.0))

    def num_lanes_serving(self, model: str) -> int:
        """Lanes of the living engines that serve a model."""
        return int(self._num_lanes[self.death + self._models.bar(model) == 0.0].sum())

    def load_wait(self, shape: RequestShape, now: float) -> LoadWait | None:
        """How long the request waits for its model's weights on each engine; None: they are there everywhere."""
        return self._models.wait(shape.needed, now)

    def drain_seconds(self, slots: EngineSlots, now: float) -> Vector:
        """Until each engine is done with all that it holds in the lane of these slots, shape [engines]."""
        return np.maximum(slots.free_at - now + slots.left, 0.0)

    def before(self, priority: int, now: float, owner: str = "") -> Fleet:
        """The fleet as seen by a new request of this owner and class, without the waiting requests that it overtakes:
        those of lower classes unless they have waited long, and those of other owners beyond their share. Read-only.
        """
        kept: dict[int, Sequence[int]] = {}  # engine -> indices of the loads that stay ahead, if not all do
        for engine in np.flatnonzero(self.num_requests).tolist():
            if self._may_be_overtaken(engine, owner, priority):
                loads = self._loads(engine)
                indices = staying_ahead(loads, owner, priority, now)
                if len(indices) < len(loads):
                    kept[engine] = indices
        if not kept:
            return self
        self.settle()
        fleet = copy(self)
        fleet._bind(self._rows.copy())
        fleet._stale, fleet._lanes, fleet._known = set(), [*self._lanes], {ANY: self._known[ANY].copy()}
        for engine, staying in kept.items():
            fleet._keep_only(engine, staying)
        return fleet

    def _may_be_overtaken(self, engine: int, owner: str, priority: int) -> bool:
        """Whether a new request of this owner and class could overtake any of the engine's; cheap, unlike the list."""
        return self._queues[engine].may_be_overtaken(owner, priority) or any(
            sent.load.owner != owner or sent.load.priority > priority
            for sent in self._pending[engine]
            if sent.load is not None
        )

    def _keep_only(self, engine: int, indices: Sequence[int]) -> None:
        """Reduce an engine's loads to these indices into `_loads`."""
        reported, loads = self._reported[engine], self._queues[engine].loads()
        staying = [loads[index] for index in indices if index < len(loads)]
        self.held_seconds[engine] = sum(load.step_seconds for load in staying)
        number = self._num_simulated(engine)
        rest = QueueRest.of(staying[number:]) if len(staying) > number else None
        self._lanes[engine] = self._lanes_with(engine, staying[:number], rest)
        self._note_moved(engine)
        pending = [(sent.load, sent.time) for sent in self._pending[engine] if sent.load is not None]
        for index in indices:
            if index >= len(loads):
                load, time = pending[index - len(loads)]
                self.held_seconds[engine] += load.step_seconds
                self._line_up(engine, load, max(reported, time))

    # ------------------------------------------------------------------------------------------------- queries

    def degree(self, shape: RequestShape) -> int:
        """Ranks that are useful to its steps, as far as engines have shown."""
        is_joint = self.costs.is_joint(shape.denoiser or shape.model)
        return useful_degree(self._joint_steps(shape)) if is_joint else 1

    def step_seconds_on(self, shape: RequestShape) -> Vector | float:
        """Seconds that the edit adds to a step, on as many ranks of each engine as are useful, shape [engines] or for
        all.
        """
        alone, degree = self.step_seconds(shape), self.degree(shape)
        if degree == 1:
            return alone
        base, joint = self.size_costs(shape).base, self._joint_steps(shape)
        added = [alone, *(max(joint[2**power] - base, 0.0) for power in range(1, degree.bit_length()))]
        powers = np.log2(np.minimum(self._num_lanes, degree)).astype(int)
        by_engine: Vector = np.array(added)[powers]
        return by_engine

    def _joint_steps(self, shape: RequestShape) -> dict[int, float]:
        """Degree -> seconds of a step of this edit alone, on so many ranks; 1 is among them."""
        costs = self.size_costs(shape)
        joint = self.costs.joint_steps(shape.denoiser or shape.model, shape.step_features)
        return {1: costs.base + self.step_seconds(shape), **joint}

    def step_seconds(self, shape: RequestShape) -> float:
        """Seconds that the edit adds to a step on one rank."""
        seconds = sum(self.costs.step(model, features) for model, features in shape.step_features.items())
        if not shape.steered:
            return seconds
        return seconds + self.costs.beside_step(shape.model, shape.controlnets, shape.control_features)

    def size_costs(self, shape: RequestShape) -> SizeCosts:
        """The costs that do not depend on its mask; valid until the next report."""
        references = shape.reference_tokens, shape.paged_reference_tokens
        beside = TokensBeside(shape.condition_tokens, shape.text_tokens, *references, shape.num_controls)
        return self.costs.of_size((shape.model, shape.image_tokens, beside, shape.encodings, shape.entry_bytes))

    def pages(self, shape: RequestShape) -> TemplatePages | None:
        """The engines that have its template's pages; None for an exact edit. Valid until the next call."""
        return None if shape.template is None else self.templates.pages(shape.template, shape.num_keyframes)

    def copy_seconds(self, shape: RequestShape) -> CopySeconds:
        """How long the request's arrays are under way."""
        if not self._byte_seconds.any():
            return CopySeconds(NOTHING, NOTHING)
        return CopySeconds(shape.copied.read * self._byte_seconds, shape.copied.written * self._byte_seconds)

    @property
    def mean_held(self) -> float:
        """Requests that a lane of a living engine holds, on average."""
        if self._num_alive_lanes is None:
            self._num_alive_lanes = int(self._num_lanes[self.is_alive].sum())
        return self._num_held / max(1, self._num_alive_lanes)

    # ------------------------------------------------------------------------------------------------- inside

    def _make_sent(self, engine: int, shape: RequestShape, now: float) -> PendingSend:
        number, priming = self._num_sent[engine], self._expect_pages(engine, shape)
        has_to_load = self._models.has_to_load(engine, shape.needed)
        loads = shape.needed, now + float(self.drain_seconds(self.slots, now)[engine]) if has_to_load else 0.0
        if not shape.num_steps:
            return PendingSend(number, None, 0.0, priming, now, *loads)
        costs, degree = self.size_costs(shape), self.degree(shape)
        step = float(np.broadcast_to(self.step_seconds_on(shape), self.num_engines)[engine])
        told = shape.priority, False, now, shape.owner
        load = RequestLoad(shape.num_steps, step, costs.other, *told, degree)
        return PendingSend(number, load, costs.base, priming, now, *loads)

    def _expect_pages(self, engine: int, shape: RequestShape) -> float:
        """Note the pages that the engine will have to prime for it; returns the seconds that takes."""
        if shape.template is None:
            return 0.0
        pages, costs = self.templates.pages(shape.template, shape.num_keyframes), self.size_costs(shape)
        if not pages.is_new[engine]:
            return 0.0
        number = pages.prime_first[engine] + pages.prime_later[engine]
        self.templates.expect(engine, shape.template, shape.num_keyframes)
        return float(number * costs.prime + costs.template)

    def _work(self, shape: RequestShape) -> float:
        """Seconds that an edit adds to the work of an engine: all of it if it has the only slot, else without the
        constant part of its steps, which it shares.
        """
        costs, step = self.size_costs(shape), self.step_seconds(shape)
        return costs.other + shape.num_steps * (step + (costs.base if self.max_num_seqs == 1 else 0.0))

    def _set_held(self, engine: int, number: float) -> None:
        self._num_held += number - float(self.num_requests[engine])
        self.num_requests[engine] = number

    def _loads(self, engine: int) -> list[RequestLoad]:
        """The engine's reported requests, followed by those sent since."""
        pending = (sent.load for sent in self._pending[engine] if sent.load is not None)
        return [*self._queues[engine].loads(), *pending]

    def _settle_engine(self, engine: int) -> None:
        first, rest = self._queues[engine].split(self._num_simulated(engine))
        pending = [sent.load for sent in self._pending[engine] if sent.load is not None]
        if rest is None:
            first = [*first, *pending]
        lanes = self._lanes[engine] = self._lanes_with(engine, first, rest)
        if rest is not None:
            for load in pending:
                lanes.line_up(load, 0.0)
        self._note_moved(engine)

    def _num_simulated(self, engine: int) -> int:
        """See MAX_SIMULATED."""
        return MAX_SIMULATED // len(self._ranks[engine]) + self.max_num_seqs

    def _lanes_with(self, engine: int, loads: Sequence[RequestLoad], rest: QueueRest | None) -> EngineLanes:
        """An engine's lanes, at its last report, with these requests, most urgent first, and the rest of the queue."""
        base = float(self.base_seconds[engine])
        lanes = EngineLanes(self._ranks[engine], self.max_num_seqs, base, loads, self._reported[engine])
        if rest is not None:
            lanes.delay(rest.seconds / lanes.num_lanes + rest.steps / self.max_num_seqs * base)
        return lanes

    def _line_up(self, engine: int, load: RequestLoad, now: float) -> None:
        """Append a request to the engine's queue."""
        self._lanes[engine].base_seconds = float(self.base_seconds[engine])
        self._lanes[engine].line_up(load, now)
        self._note_moved(engine)

    def _note_moved(self, engine: int) -> None:
        """Note that an engine's lanes have changed."""
        for known in self._known.values():
            known.stale.add(engine)

    def _refresh(self, kind: LaneKind) -> EngineSlots:
        """Compute the slots of the engines whose lanes have changed."""
        (needed, degree), known = kind, self._known[kind]
        while known.stale:
            lanes = self._lanes[engine := known.stale.pop()]
            known.set(engine, lanes.next_lane(self._models.ranks_with(needed, engine), degree), lanes.base_seconds)
        return known.slots
