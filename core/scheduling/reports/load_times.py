"""LoadTimes: when the weights of each model, ControlNet and class could be used on one engine, for its router.

What ranks are loading comes first, then what live requests lack, in the order in which they came, and then any other
model. Each load is assumed to go to the set of ranks that ends it soonest. Where it has no room beside what live
requests need, all that run are assumed to end before. Which components are dropped for it is not predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from core.costs.load_report import ModelLoad, ModelState, SpareBytes, WeightsKind
from core.handles import ModelKey, RankIds
from core.run_class import RUN_CLASS
from core.scheduling.ranks.residency import Residency, keys_of
from core.scheduling.requests.bindings import Bindings, Needs

GUESSED_BYTES_PER_SECOND = 1e9
"""Speed of loading before any load was measured: a fast disk's."""

LEAST_SECONDS = 1e-3
"""Least predicted time of a load: what has to be loaded is never reported as if it were there."""

MOST_SETS = 4
"""Sets of ranks that are considered for a load: those that end their present ones first."""

SAME = 0.1
"""Relative change of a time that is not reported: each load that is measured changes all predictions a little."""


class LoadTimes:
    """One per scheduler, in its Reporter."""

    def __init__(self, bindings: Bindings, residency: Residency) -> None:
        self._residency = residency
        self._bindings = bindings
        self._weights = tuple(_weights(bindings, residency))
        self._told: dict[_Name, ModelLoad] = {}  # as last reported
        self.seconds = 0.0  # of loading what requests lack, as last predicted, without the wait for room
        self._forecast = _LoadForecast(residency, (), (), 0.0)  # the last one
        self._room: SpareBytes | None = None
        self._room_seen: tuple[int, Sequence[Needs]] = -1, ()  # version of the residency, and what was needed then
        self._seen: tuple[int, tuple[Needs, ...]] = -1, ()  # version of the residency, and what requests lacked then

    def take(self, needs: Iterable[Needs], running_seconds: float = 0.0) -> tuple[float | None, tuple[ModelLoad, ...]]:
        """LoadReport.load_seconds and LoadReport.models since the last call. needs: those of the live requests.
        running_seconds: until all that run are done, which what has no room waits for.
        """
        residency, every = self._residency, tuple(needs)
        lacking = () if residency.is_complete else tuple(each for each in every if residency.missing(each))
        if self._seen == (residency.version, lacking):
            return None, ()
        self._seen = residency.version, lacking
        forecast, states = _LoadForecast(residency, lacking, every, running_seconds), residency.states()
        self._forecast = forecast
        classes: dict[_Name, Needs] = {
            (name, "class", ""): (self._bindings.keys(name, RUN_CLASS),) for name in self._bindings.classes
        }
        self._told = {name: load for name, load in self._told.items() if load.kind != "class" or name in classes}
        found = (
            ModelLoad(
                *(name, kind, *forecast.of(own, states[name] if kind == "model" else "unloaded"), net),
                *(_ranks_with(residency, own), forecast.added_bytes(own)),
            )
            for (name, kind, net), own in (*self._weights, *classes.items())
        )
        changed = tuple(load for load in found if not self._is_told(load))
        self._told |= {_name(load): load for load in changed}
        self.seconds = forecast.load_seconds
        return forecast.seconds, changed

    def room(self, needs: Sequence[Needs]) -> SpareBytes | None:
        """LoadReport.room, after `take` with the same needs, which are the same object until they change."""
        residency = self._residency
        if not residency.budget:
            return None
        if self._room_seen[0] != residency.version or self._room_seen[1] is not needs:
            self._room_seen = residency.version, needs
            self._room = self._forecast.room(needs)
        return self._room

    def _is_told(self, load: ModelLoad) -> bool:
        told = self._told.get(_name(load))
        if told is None or (told.state, told.ranks, told.nbytes) != (load.state, load.ranks, load.nbytes):
            return False
        return abs(told.seconds - load.seconds) <= SAME * max(told.seconds, load.seconds)


_Name = tuple[str, WeightsKind, str]
"""Of a model or class, kind, and name of a ControlNet, as a ModelLoad has them."""


def _name(load: ModelLoad) -> _Name:
    return load.name, load.kind, load.controlnet


def _weights(bindings: Bindings, residency: Residency) -> Iterator[tuple[_Name, Needs]]:
    """(name, what they consist of), of all models but adapters, their segmenters and ControlNets."""
    for name, info in bindings.models.items():
        if not info.parent:
            yield (name, "model", ""), residency.needs_of(name)
            if info.segmenter:
                yield (name, "segmenter", ""), (bindings.keys(name, "segmenter"),)
            for net in info.controlnets:
                yield (name, "controlnet", net), (bindings.controlnets(name, (net,)),)


def _ranks_with(residency: Residency, needs: Needs) -> RankIds:
    """See ModelLoad: those that can make steps with these, if they make any."""
    having = {rank for keys in needs if keys.makes_steps for rank in residency.homes(keys).ranks}
    has_all = all(having.issuperset(ranks) for ranks in residency.sets)
    return () if has_all else tuple(sorted(having))


class _LoadForecast:
    """When each set of ranks will have loaded what it is loading, and what requests lack."""

    def __init__(
        self, residency: Residency, lacking: Iterable[Needs], needs: Iterable[Needs], running_seconds: float
    ) -> None:
        """lacking: what requests need of which something is on no set, the first one first. needs: what all need.
        running_seconds: until those that run are done.
        """
        self._residency = residency
        self._needed = {key for each in needs for key in keys_of(each)}
        self._running_seconds = running_seconds
        self._waits: dict[RankIds, float] = {}  # set of ranks -> seconds of `_ends` that it waits for room
        self._ends: dict[RankIds, float] = {}  # set of ranks -> seconds until its loads end
        self._loads: dict[RankIds, dict[ModelKey, float]] = {}  # set of ranks -> its loads, seconds until each ends
        for ranks in residency.sets:
            awaited = residency.awaited(ranks)
            self._ends[ranks] = sum(map(self._seconds, awaited))
            self._loads[ranks] = dict.fromkeys(awaited, self._ends[ranks])
        self._expected = {key for loads in self._loads.values() for key in loads}
        if self._ends:
            for each in lacking:
                self._plan(keys_of(residency.missing(each)))
        self.seconds = min(self._ends.values(), default=0.0)  # until the first set could load something else
        # Of these: loading.
        self.load_seconds = min((end - self._waits.get(ranks, 0.0) for ranks, end in self._ends.items()), default=0.0)

    def of(self, needs: Needs, state: ModelState) -> tuple[ModelState, float]:
        """The state and the seconds of a ModelLoad for these. state: as the residency knows it."""
        missing = self._residency.missing(needs)
        if not missing or not self._ends:
            return "loaded", 0.0
        keys = keys_of(missing)
        _, end, load = self._soonest(keys)
        if not load:
            return "loading", end
        if state == "loading":  # some of these are, for another model
            state = "unloaded"
        if state == "unloaded" and self._residency.has_failed(keys):
            state = "failed"
        return state, max(end - self.seconds, LEAST_SECONDS)

    def added_bytes(self, needs: Needs) -> int:
        """ModelLoad.nbytes for these."""
        if not (self._residency.budget and self._ends):
            return 0
        missing = keys_of(self._residency.missing(needs))
        return sum(map(self._residency.size_of, self._soonest(missing)[2])) if missing else 0

    def room(self, needs: Iterable[Needs]) -> SpareBytes:
        """On the set that has most, once the planned loads have ended. needs: what all live requests need. There is a
        budget.
        """
        needed = {key for each in needs for key in keys_of(each)}
        # Each once: of many sets, most have the same.
        kinds = {(self._residency.present(ranks), frozenset(loads)) for ranks, loads in self._loads.items()}
        found = (self._room_beside(present, loads, needed) for present, loads in kinds)
        return max(found, key=lambda room: (room.idle, room.free, -room.used), default=SpareBytes(0, 0))

    def _room_beside(
        self, present: frozenset[ModelKey], loads: frozenset[ModelKey], needed: set[ModelKey]
    ) -> SpareBytes:
        """On a set that has these components, and is to load others."""
        residency, idle = self._residency, present - needed - loads
        free = -residency.excess(loads, present)
        with_idle = free + sum(map(residency.size_of, idle))
        return SpareBytes(max(0, free), max(0, with_idle), min(map(residency.used, idle), default=0.0))

    def _in_use(self, ranks: RankIds) -> frozenset[ModelKey]:
        """What a set has that live requests need, and what it loads for them."""
        return (self._residency.present(ranks) & self._needed) | self._loads[ranks].keys()

    def _plan(self, keys: Sequence[ModelKey]) -> None:
        """Note that these are to be loaded, once those that run are done if there is no room beside what they need."""
        ranks, end, load = self._soonest(keys)
        if load and self._residency.excess(load, self._in_use(ranks)) > 0 and ranks not in self._waits:
            self._waits[ranks] = self._running_seconds
            end += self._running_seconds
        self._ends[ranks] = max(end, self._ends[ranks])
        self._loads[ranks] |= dict.fromkeys(load, end)
        self._expected.update(load)

    def _soonest(self, keys: Sequence[ModelKey]) -> tuple[RankIds, float, list[ModelKey]]:
        """(the set that will have all of these first, seconds until then, those of them that it does not load yet)"""
        if not self._expected.isdisjoint(keys):
            expecting = [found for ranks in self._ends if not (found := self._on(ranks, keys))[2]]
            if expecting:
                return min(expecting, key=_end)
        first = sorted(self._ends, key=self._ends.__getitem__)[:MOST_SETS] if len(self._ends) > 1 else self._ends
        return min((self._on(ranks, keys) for ranks in first), key=_end)

    def _on(self, ranks: RankIds, keys: Iterable[ModelKey]) -> tuple[RankIds, float, list[ModelKey]]:
        """As `_soonest`, for this set."""
        present, loads = self._residency.present(ranks), self._loads[ranks]
        load = [key for key in keys if key not in present and key not in loads]
        if load:
            return ranks, self._ends[ranks] + sum(map(self._seconds, load)), load
        return ranks, max((loads[key] for key in keys if key in loads), default=0.0), load

    def _seconds(self, key: ModelKey) -> float:
        return self._residency.load_seconds(key) or self._residency.size_of(key) / GUESSED_BYTES_PER_SECOND


def _end(found: tuple[RankIds, float, list[ModelKey]]) -> float:
    return found[1]
