"""Fleet: the state of all engines as a router knows it, in arrays over engines, so that a decision is one expression.

An engine is modelled as a FIFO queue in front of `max_num_seqs` slots that advance together, step by step. Its load
reports keep a copy of its queue with the remaining work of its requests; from it follow the time at which a slot is
free for a new request, and the work left in the other slots at that time:

    free_at [engines]                 when a slot is free, in seconds of the caller's clock; in the past: since then
    steps, seconds [slots, engines]   steps left in each slot at `free_at`, most first, and seconds it adds to each step

Reports come when something changed, not at every step: in between, steps are assumed to pass at the predicted pace.
These are `EngineSlots`, computed only when they are read after a report: from the first MAX_SIMULATED requests of the
queue one by one, and from sums over the rest, which is assumed to leave the slots as it found them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from core.costs.forecast import Slot, until_free
from core.costs.load_report import LoadReport, RequestLoad
from core.routing.engine_queue import EngineQueue
from core.routing.fleet_costs import FleetCosts, SizeCosts, TokensBeside, Vector
from core.routing.model_map import LoadWait, ModelMap
from core.routing.overtaking import staying_ahead
from core.routing.request_shape import RequestShape
from core.routing.template_map import Counts, TemplateMap, TemplatePages
from core.routing.weights import Weights

MAX_SIMULATED = 256
"""Requests of an engine's queue that are looked at one by one, besides one for each slot; as many as a server takes by
default. Taking sums for the rest shifts a prediction by less than the time of one request.
"""

TINY = 1e-9
"""Seconds; keeps divisions by the step time of an idle engine finite."""


class EngineSlots(NamedTuple):
    """What is expected in the slots of each engine when one of them is free for a new request."""

    free_at: Vector  # when that is, in seconds of the caller's clock, shape [engines]
    pace: Vector  # seconds of a step of the requests in the slots, shape [engines]
    num_placed: Vector  # number of these requests, shape [engines]
    steps: Vector  # steps left in each slot, most first, shape [slots, engines]
    seconds: Vector  # seconds that the request in each slot adds to a step, shape [slots, engines]


@dataclass(slots=True)
class PendingSend:
    """An edit or a template that was sent to an engine and is not in its last report yet."""

    number: int  # its number among all that were sent there, from 1
    load: RequestLoad | None  # None for a template
    base_seconds: float  # the constant part of its steps
    priming_seconds: float  # priming that it causes
    time: float  # when it was sent
    needed: tuple[Weights, ...]  # what is loaded for it


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
        # Model -> engine -> until when it refuses it, seconds.
        self._refused: dict[str, dict[int, float]] = {}
        self.num_alive = num_engines
        self._stale: set[int] = set()  # engines whose slots are to be computed from their last reports
        self._bind(np.zeros((7 + 2 * max_num_seqs, num_engines)))
        self._slots.pace[:] = TINY
        self.last_sent: Counts = np.full(num_engines, -1.0)  # number of the last send there, counted over all engines
        self._num_held = 0.0
        self._num_sends = 0
        self._num_sent = [0] * num_engines  # since the engine was (re)started
        self._pending: list[list[PendingSend]] = [[] for _ in range(num_engines)]
        self._queues = [EngineQueue() for _ in range(num_engines)]
        self._reported = [0.0] * num_engines  # time of each engine's last report

    def _bind(self, rows: Vector) -> None:
        """Name the rows of one array, shape [engines] each; a column is the state of one engine."""
        self._rows, number = rows, self.max_num_seqs
        self.num_requests, self.held_seconds, self.base_seconds, self.priming_seconds = rows[:4]
        self._slots = EngineSlots(rows[4], rows[5], rows[6], rows[7 : 7 + number], rows[7 + number :])

    @property
    def slots(self) -> EngineSlots:
        """What is expected in the slots of all engines, their last reports included; valid until the next event."""
        self.settle()
        return self._slots

    # ------------------------------------------------------------------------------------------------- events

    def observe(self, engine: int, report: LoadReport, now: float) -> None:
        """Update an engine's state from its report. Reports of dead engines are ignored."""
        if engine in self._lost:
            return
        self._set_death(engine, is_dead=not report.num_ranks)
        self._note_refused(engine, report.refused)
        if report.costs is not None:
            self.costs.observe(report.costs)
        for resident in report.resident_pages:
            self.templates.observe(engine, resident)
        pending = [sent for sent in self._pending[engine] if sent.number > report.num_received]
        self._pending[engine] = pending
        self._models.observe(engine, report, [(sent.needed, sent.time) for sent in pending], now)
        queue = self._queues[engine]
        queue.update(report)
        if not (pending or queue or report.priming_seconds):
            self.templates.clear_expected(engine)
        self._set_held(engine, report.num_running + report.num_waiting + len(pending))
        self.base_seconds[engine] = max([report.base_seconds, *(sent.base_seconds for sent in pending)])
        self.priming_seconds[engine] = report.priming_seconds + sum(sent.priming_seconds for sent in pending)
        self.held_seconds[engine] = queue.step_seconds + sum(sent.load.step_seconds for sent in pending if sent.load)
        self._reported[engine] = now
        self._stale.add(engine)

    def settle(self) -> None:
        """Compute the slots of the engines that have reported since the last time; reading them does it too."""
        while self._stale:
            self._settle_engine(self._stale.pop())

    def sent(self, engine: int, shape: RequestShape, now: float) -> None:
        """Note what was just sent to an engine; it counts until the engine's own report includes it."""
        self.settle()
        self._num_sent[engine] += 1
        self.last_sent[engine] = self._num_sends
        self._num_sends += 1
        sent = self._make_sent(engine, shape, now)
        self._pending[engine].append(sent)
        self._models.send(engine, sent.needed, self._work(shape), now)
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

    def restore(self, engine: int) -> None:
        """Mark a restarted engine as alive and empty."""
        self._lost.discard(engine)
        self._set_death(engine, is_dead=False)

    def has_lost(self, engine: int) -> bool:
        """Whether an engine is marked as dead."""
        return engine in self._lost

    def _set_death(self, engine: int, *, is_dead: bool) -> None:
        self.death[engine] = np.inf if is_dead else 0.0
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
        fleet.death, fleet._stale = np.where(others, 0.0, np.inf), set()
        fleet.num_alive, fleet._num_held = int(others.sum()), float(self.num_requests[others].sum())
        return fleet

    def num_serving(self, model: str) -> int:
        """Living engines that serve a model."""
        return int(np.count_nonzero(self.death + self._models.bar(model) == 0.0))

    def load_wait(self, shape: RequestShape, now: float) -> LoadWait | None:
        """How long the request waits for its model's weights on each engine; None: they are there everywhere."""
        return self._models.wait(shape.needed, now)

    def before(self, priority: int, now: float, owner: str = "") -> Fleet:
        """The fleet as seen by a new request of this owner and class, without the waiting requests that it overtakes:
        those of lower classes unless they have waited long, and those of other owners beyond their share. Read-only.
        """
        kept: dict[int, Sequence[int]] = {}  # engine -> indices of the loads that stay ahead, if not all do
        for engine in range(self.num_engines):
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
        fleet._stale = set()
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
        self._set_loads(engine, reported, staying)
        pending = [(sent.load, sent.time) for sent in self._pending[engine] if sent.load is not None]
        for index in indices:
            if index >= len(loads):
                load, time = pending[index - len(loads)]
                self.held_seconds[engine] += load.step_seconds
                self._line_up(engine, load, max(reported, time))

    # ------------------------------------------------------------------------------------------------- queries

    def step_seconds(self, shape: RequestShape) -> float:
        """Seconds that the edit adds to a step."""
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

    @property
    def mean_held(self) -> float:
        """Requests that a living engine holds, on average."""
        return self._num_held / max(1, self.num_alive)

    # ------------------------------------------------------------------------------------------------- inside

    def _line_up(self, engine: int, load: RequestLoad, now: float) -> None:
        """Append a request to the engine's queue."""
        start = max(now, float(self._slots.free_at[engine]))
        self._set_slots(engine, start, [*self._slots_of(engine, now), _slot(load)])

    def _make_sent(self, engine: int, shape: RequestShape, now: float) -> PendingSend:
        number, priming = self._num_sent[engine], self._expect_pages(engine, shape)
        if not shape.num_steps:
            return PendingSend(number, None, 0.0, priming, now, shape.needed)
        costs, step = self.size_costs(shape), self.step_seconds(shape)
        load = RequestLoad(shape.num_steps, step, costs.other, shape.priority, arrival=now, owner=shape.owner)
        return PendingSend(number, load, costs.base, priming, now, shape.needed)

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
        first, rest = self._queues[engine].split(MAX_SIMULATED + self.max_num_seqs)
        pending = [sent.load for sent in self._pending[engine] if sent.load is not None]
        if rest is None:
            self._set_loads(engine, self._reported[engine], [*first, *pending])
            return
        self._set_loads(engine, self._reported[engine], first)
        rounds = rest.steps / self.max_num_seqs
        self._slots.free_at[engine] += rest.seconds + rounds * float(self.base_seconds[engine])
        for load in pending:
            self._line_up(engine, load, 0.0)

    def _set_loads(self, engine: int, now: float, loads: Sequence[RequestLoad]) -> None:
        """Set the engine's requests, most urgent first, as of the start of a step that `steps_left` does not count."""
        alone = sum(load.other_seconds for load in loads if not load.steps_left)
        slots = [_slot(load) for load in loads if load.steps_left]
        begun = sum(seconds for _, seconds in slots[: self.max_num_seqs])
        under_way = begun + float(self.base_seconds[engine]) if slots else 0.0
        self._set_slots(engine, now + alone + under_way, slots)

    def _slots_of(self, engine: int, now: float) -> list[Slot]:
        """The contents of the engine's slots at the later of `now` and `free_at`."""
        slots = self._slots
        passed = max(now - slots.free_at[engine], 0.0) / slots.pace[engine]
        rows = zip(slots.steps[:, engine].tolist(), slots.seconds[:, engine].tolist(), strict=True)
        return [(steps - passed, seconds) for steps, seconds in rows if steps > passed]

    def _set_slots(self, engine: int, start: float, loads: Iterable[Slot]) -> None:
        """Recompute the engine's slots if these requests go through them in this order from `start` on."""
        base = float(self.base_seconds[engine])
        waited, left = until_free(loads, self.max_num_seqs, base)
        left.sort(reverse=True)
        pace = max(base + sum([seconds for _, seconds in left]), TINY) if left else TINY
        padding = [0.0] * (self.max_num_seqs - len(left))
        steps, seconds = [steps for steps, _ in left], [seconds for _, seconds in left]
        self._rows[4:, engine] = [start + waited, pace, len(left), *steps, *padding, *seconds, *padding]


def _slot(load: RequestLoad) -> Slot:
    """A request's steps left and seconds per step, with its encoding and decoding spread over the steps."""
    return float(load.steps_left), load.step_seconds + load.other_seconds / load.steps_left
