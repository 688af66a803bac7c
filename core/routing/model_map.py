"""ModelMap: which engines have the weights that requests need, and when the others could.

An engine that has to load weights first is compared with one that loads them already as if both had them: a burst of
requests then follows its first one, unless its queue is longer than loading the weights once more takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from core.costs.load_report import LoadReport, ModelLoad
from core.handles import RankIds
from core.routing.fleet_costs import Vector
from core.routing.weights import Weights

TINY = 1e-9
"""Seconds; keeps divisions finite."""

NOTHING: Vector = np.zeros(1)


class Drops(NamedTuple):
    """What loading weights means for others that an engine has, shape [engines] each."""

    drops: npt.NDArray[np.bool_]  # whether some are dropped for them
    unused: Vector  # seconds since these were used, above 0
    waits: npt.NDArray[np.bool_]  # whether requests need these, so that all that the engine holds has to end before


class LoadWait(NamedTuple):
    """What loading weights means for a request, float64 [engines] each; valid until the next event."""

    seconds: Vector  # until they are loaded and the requests are done that wait for them already
    repeated: Vector  # by which loading them should wait for another engine that loads them already
    own: Vector  # seconds of loading them; 0: they are there, or a request has asked for them
    dropping: Drops | None  # None: engines have room for all

    @property
    def is_first(self) -> npt.NDArray[np.bool_]:
        """Whether no request has asked for them there."""
        is_first: npt.NDArray[np.bool_] = self.own > 0.0
        return is_first


class _Places:
    """One Weights on each engine; shape [engines] each."""

    def __init__(self, num_engines: int) -> None:
        # Work of the requests that were sent there to wait for them, since they are being loaded.
        self.behind: Vector = np.zeros(num_engines)
        self.due: Vector = np.zeros(num_engines)  # when they are loaded, if they are being loaded; in the past: there
        self.own: Vector = np.zeros(num_engines)  # seconds of loading them, if nobody has asked for them; 0: they have
        self.nbytes: Vector = np.zeros(num_engines)  # that loading them adds
        # Of all engines, because most decisions look no further.
        self.are_asked_for, self.last_due = True, 0.0

    def set(self, engine: int, due: float, own: float) -> None:
        self.due[engine], self.own[engine] = due, own
        self.are_asked_for, self.last_due = not self.own.any(), float(self.due.max())

    def is_coming(self, engine: int, now: float) -> bool:
        return not self.own[engine] and bool(self.due[engine] > now)

    def are_there(self, now: float) -> bool:
        """Whether all engines have them."""
        return self.are_asked_for and self.last_due <= now


class ModelMap:
    """Owned by one Fleet. Times are seconds of its clock. Of weights that were not reported, all engines count as
    having them.
    """

    def __init__(self, num_engines: int, served: Sequence[Collection[str]] = ()) -> None:
        """served: names of the models that each engine serves; (): all serve all."""
        self._num_engines = num_engines
        self._served = served
        self.differs = bool(served)  # whether an engine may lack a model
        self._bars: dict[str, Vector] = {}  # model -> infinity where it is not served, else 0; computed when asked for
        self._places: dict[Weights, _Places] = {}
        self._ranks: dict[Weights, dict[int, RankIds]] = {}  # engine -> those that have them, where not all do
        self._until: Vector = np.zeros(num_engines)  # when what requests wait for is loaded
        # Bytes for further weights: without dropping any, and with those that no request needs.
        self._free: Vector = np.full(num_engines, np.inf)
        self._idle: Vector = np.full(num_engines, np.inf)
        self._used: Vector = np.zeros(num_engines)  # when those were used last that are dropped first
        self._is_limited = False  # whether any engine has reported these
        # By engine: what it has reported, and what was sent there since to be loaded.
        self._reported: list[dict[Weights, tuple[float, float]]] = [{} for _ in range(num_engines)]  # -> due, own
        self._reported_until = [0.0] * num_engines
        self._asked: list[set[Weights]] = [set() for _ in range(num_engines)]

    # ------------------------------------------------------------------------------------------------- events

    def observe(
        self, engine: int, report: LoadReport, sent: Iterable[tuple[Sequence[Weights], float, float]], now: float
    ) -> None:
        """Take over a report. sent: what requests need that are not in it yet, when each was sent, and when what the
        engine had before is done.
        """
        asked, self._asked[engine] = self._asked[engine], set()
        for weights in asked:
            self._places[weights].set(engine, *self._reported[engine][weights])
        if report.load_seconds is not None:
            self._reported_until[engine] = now + report.load_seconds
        self._until[engine] = self._reported_until[engine]
        if (room := report.room) is not None:
            self._is_limited = True
            self._free[engine], self._idle[engine], self._used[engine] = room.free, room.idle, room.used
        for load in report.models:
            self._take(engine, load, now)
        for needed, time, drained in sent:
            self._ask(engine, needed, time, drained)
        for places in map(self._places.__getitem__, asked):
            if places.own[engine]:  # the requests that asked have ended
                places.behind[engine] = 0.0

    def send(self, engine: int, needed: Sequence[Weights], work: float, drained: float, now: float) -> None:
        """Note that a request was sent there that needs these: they are loaded if they are not there. work: its seconds
        without a wait. drained: when what the engine had before is done, if it has to load any.
        """
        self._ask(engine, needed, now, drained)
        for weights in needed:
            places = self._places.get(weights)
            if places is not None and places.is_coming(engine, now):
                places.behind[engine] += work

    def has_to_load(self, engine: int, needed: Iterable[Weights]) -> bool:
        """Whether any of these is not there, and no request has asked for it."""
        return any(places.own[engine] for each in needed if (places := self._places.get(each)) is not None)

    def _ask(self, engine: int, needed: Iterable[Weights], now: float, drained: float) -> None:
        for weights in needed:
            places = self._places.get(weights)
            if places is not None and places.own[engine]:
                nbytes = float(places.nbytes[engine])
                begin = drained if nbytes > self._idle[engine] else now
                until = max(float(self._until[engine]), begin) + float(places.own[engine])
                self._until[engine] = until
                self._free[engine] = max(self._free[engine] - nbytes, 0.0)
                self._idle[engine] = max(self._idle[engine] - nbytes, 0.0)
                places.set(engine, until, 0.0)
                self._asked[engine].add(weights)

    def forget(self, engine: int) -> None:
        """Forget what a dead engine has reported."""
        for places in self._places.values():
            places.set(engine, 0.0, 0.0)
            places.behind[engine] = 0.0
        for ranks in self._ranks.values():
            ranks.pop(engine, None)
        self._reported[engine].clear()
        self._asked[engine].clear()
        self._until[engine] = self._reported_until[engine] = 0.0
        self._free[engine] = self._idle[engine] = np.inf

    def drop(self, weights: Weights) -> None:
        """Forget weights that no request needs any more."""
        self._places.pop(weights, None)
        self._ranks.pop(weights, None)
        for engine in range(self._num_engines):
            self._reported[engine].pop(weights, None)
            self._asked[engine].discard(weights)

    def _take(self, engine: int, load: ModelLoad, now: float) -> None:
        weights = Weights(load.name, load.kind, load.controlnet)
        places = self._places.get(weights)
        if places is None:
            places = self._places[weights] = _Places(self._num_engines)
        is_coming = load.state in ("loaded", "loading")
        facts = (now + load.seconds, 0.0) if is_coming else (0.0, load.seconds)
        places.set(engine, *facts)
        places.nbytes[engine] = load.nbytes
        self._reported[engine][weights] = facts
        ranks = self._ranks.setdefault(weights, {})
        ranks.pop(engine, None)
        if load.ranks:
            ranks[engine] = load.ranks
        if load.state != "loading":
            places.behind[engine] = 0.0

    # ------------------------------------------------------------------------------------------------- queries

    def bar(self, model: str) -> Vector | float:
        """Infinity where the model is not served, else 0. "": any engine serves."""
        if not self.differs or not model:
            return 0.0
        found = self._bars.get(model)
        if found is None:
            serving = [model in names for names in self._served]
            found = self._bars[model] = np.where(serving, 0.0, np.inf)
        return found

    def are_on_some_ranks(self, needed: Iterable[Weights]) -> bool:
        """Whether any engine has any of these on some of its ranks alone."""
        return any(self._ranks.get(weights) for weights in needed)

    def ranks_with(self, needed: Iterable[Weights], engine: int) -> RankIds:
        """Those of an engine's ranks that can make steps with all of these; (): all can, or no rank."""
        found = [ranks for weights in needed if (ranks := self._ranks.get(weights, {}).get(engine))]
        return tuple(rank for rank in found[0] if all(rank in ranks for ranks in found)) if found else ()

    def wait(self, needed: Iterable[Weights], now: float) -> LoadWait | None:
        """How long a request waits for these on each engine; None: they are there everywhere."""
        found = [places for each in needed if (places := self._places.get(each)) and not places.are_there(now)]
        if not found:
            return None
        if len(found) == 1:  # most of the time
            own, nbytes = found[0].own, found[0].nbytes
        else:
            own, nbytes = (
                np.add.reduce(each) for each in zip(*((each.own, each.nbytes) for each in found), strict=True)
            )
        lacks = own > 0.0
        seconds, repeated = (np.maximum(self._until - now, 0.0) + own) * lacks, NOTHING
        if any(places.last_due > now for places in found):
            coming = np.maximum(np.maximum.reduce([places.due for places in found]) - now, 0.0)
            behind = np.maximum.reduce([places.behind for places in found])
            seconds += np.where(lacks | (coming == 0.0), 0.0, coming + behind)
            begun = coming[(coming > 0.0) & ~lacks]
            repeated = np.minimum(own, float(begun.min()) if len(begun) else 0.0)
        return LoadWait(seconds, repeated, own, self._dropping(nbytes, lacks, now))

    def _dropping(self, nbytes: Vector, lacks: npt.NDArray[np.bool_], now: float) -> Drops | None:
        """Of engines that lack so many bytes of weights."""
        if not self._is_limited:
            return None
        waits = lacks & (nbytes > self._idle)
        unused = np.maximum((now - self._used) * ~waits, TINY)
        return Drops(lacks & (nbytes > self._free), unused, waits)
