"""LoadWatch: what requests wait for before they begin, by what the ranks themselves have.

A WatchedScheduler shows it every pass. A request begins when the first plan with a batch of it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.simulation.rank_memory import RankMemory
from core.handles import ModelKey, RankIds
from core.messages.engine import EngineRequest
from core.messages.worker import ModelFailed, ModelLoaded, StepPlan
from core.scheduling.model_loads import LoadAnswer
from core.scheduling.requests.bindings import Needs
from core.scheduling.scheduler import StepScheduler


class LoadWatch:
    """One per scheduler. All times are seconds, summed over requests."""

    def __init__(self, memory: RankMemory, needs: Mapping[str, Needs]) -> None:
        """needs: of each model."""
        self.waiting = 0.0  # until requests have begun, or have ended without
        self.waiting_for_loads = 0.0  # while no rank had what they need
        self.waiting_beside_idle = 0.0  # while what they need was there, and a rank without work had its transformer
        self.waited_for_loads: set[str] = set()  # ids of requests that did
        self.avoidable: set[str] = set()  # of those that began when a load ended, and that could have begun without it
        self._memory, self._needs = memory, needs
        self._unbegun: dict[str, dict[str, None]] = {}  # model -> ids of its requests that have not begun
        self._models: dict[str, str] = {}  # id -> model, of these requests
        self._now = 0.0
        self._is_missing: dict[str, bool] = {}  # model -> whether no rank has what it needs; computed when asked for
        self._version = -1  # of the memory, for `_is_missing`
        self._beside_idle: list[str] = []  # models that are there, with an idle rank for their steps
        self._avoiding: set[str] = set()  # models that need what was just loaded, and were there without it

    def note_arrival(self, request: EngineRequest, now: float) -> None:
        """Note a request that the scheduler gets next."""
        self._pass_time(now)
        self._unbegun.setdefault(request.model, {})[request.request_id] = None
        self._models[request.request_id] = request.model

    def note_end(self, request_id: str) -> None:
        """Note the terminal message of a request."""
        self._note_begun(request_id)

    def note_answer(self, answer: LoadAnswer, sets: tuple[RankIds, ...]) -> None:
        """Note a load that a rank has just ended, before the scheduler knows of it. sets: of live ranks."""
        match answer:
            case ModelLoaded():
                key, users = answer.loaded.key, [name for name in self._unbegun if self._uses(name, answer.loaded.key)]
                without = {name for name in users if not self._lacks(name, sets, (answer.rank, key))}
                self._avoiding |= without
            case ModelFailed():
                pass

    def note_pass(self, plan: StepPlan | None, now: float, sets: tuple[RankIds, ...], idle: frozenset[int]) -> None:
        """Note what a pass of the scheduler has made. idle: ranks without work after it."""
        self._pass_time(now)
        for batch in plan.batches if plan is not None else ():
            for item in batch.items:
                if self._models.get(item.request_id) in self._avoiding:
                    self.avoidable.add(item.request_id)
                self._note_begun(item.request_id)
        if plan is None:
            self._avoiding.clear()
            self._look(sets, idle)

    def _pass_time(self, now: float) -> None:
        """Count the time since the last pass, as it was then."""
        passed, self._now = now - self._now, now
        if not passed:
            return
        for model, ids in self._unbegun.items():
            self.waiting += passed * len(ids)
            if self._is_missing.get(model, False):
                self.waiting_for_loads += passed * len(ids)
                self.waited_for_loads.update(ids)
        for model in self._beside_idle:
            self.waiting_beside_idle += passed * len(self._unbegun.get(model, ()))

    def _look(self, sets: tuple[RankIds, ...], idle: frozenset[int]) -> None:
        if self._version != self._memory.version:
            self._version = self._memory.version
            self._is_missing.clear()
        self._beside_idle.clear()
        for model in self._unbegun:
            if model not in self._is_missing:
                self._is_missing[model] = self._lacks(model, sets)
            if not self._is_missing[model] and self._has_idle(model, idle):
                self._beside_idle.append(model)

    def _note_begun(self, request_id: str) -> None:
        model = self._models.pop(request_id, None)
        if model is not None:
            del self._unbegun[model][request_id]
            if not self._unbegun[model]:
                del self._unbegun[model]

    # ------------------------------------------------------------------------------------------------- what is there

    def _uses(self, model: str, key: ModelKey) -> bool:
        return any(key in keys.keys for keys in self._needs[model])

    def _lacks(self, model: str, sets: tuple[RankIds, ...], but: tuple[int, ModelKey] | None = None) -> bool:
        """Whether some node of a model has no set of ranks with its components. but: (rank, component) that does not
        count.
        """
        return not all(any(self._is_on(keys.keys, ranks, but) for ranks in sets) for keys in self._needs[model])

    def _is_on(self, keys: tuple[ModelKey, ...], ranks: RankIds, but: tuple[int, ModelKey] | None) -> bool:
        if but is not None and but[0] in ranks and but[1] in keys:
            return False
        return all(self._memory.has(rank, keys) for rank in ranks)

    def _has_idle(self, model: str, idle: frozenset[int]) -> bool:
        steps = [keys.keys for keys in self._needs[model] if any(key.component == "transformer" for key in keys.keys)]
        return any(self._memory.has(rank, keys) for keys in steps for rank in idle)


class WatchedScheduler(StepScheduler):
    """Shows a watch what it does. The watch is set before the first request."""

    watch: LoadWatch

    def add(self, head: EngineRequest) -> None:
        self.watch.note_arrival(head, head.arrival)
        super().add(head)

    def apply_load(self, answer: LoadAnswer, now: float) -> None:
        self.watch.note_answer(answer, self.ranks.residency.sets)
        super().apply_load(answer, now)

    def schedule(self, now: float, *, again: bool = False) -> StepPlan | None:
        plan = super().schedule(now, again=again)
        self.watch.note_pass(plan, now, self.ranks.residency.sets, self._in_flight.idle_ranks)
        return plan
