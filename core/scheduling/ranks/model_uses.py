"""ModelUses: which models each rank has, and how often requests have made their steps with them there.

A rank has a model if it has the components that make the model's steps: a text encoder or VAE may be on another rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import msgspec

from core.costs.load_report import RankModel, RankModelState
from core.graph.op import OPS
from core.handles import ModelKey
from core.scheduling.ranks.in_flight import Flight
from core.scheduling.ranks.residency import Residency


@dataclass(slots=True)
class _Use:
    """Of a model on a rank."""

    used: float = 0.0  # when a step with it was last sent there, monotonic seconds
    hits: int = 0  # of the load with this number
    load: int = 0


@dataclass(frozen=True, slots=True)
class _Told:
    """What was told last of a rank. state: what it depends on beside uses."""

    state: Hashable
    rows: dict[str, RankModel]  # by model


class ModelUses:
    """One per scheduler, in its Ranks. Of models without adapters, whose uses are their model's."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._all = {name: info.components for name, info in residency.models.items() if not info.parent}
        self._steps = {name: _making_steps(keys) for name, keys in self._all.items()}
        self._order = {name: index for index, name in enumerate(self._all)}
        self._makers: defaultdict[ModelKey, list[str]] = defaultdict(list)  # component -> models whose steps it makes
        for name, keys in self._steps.items():
            for key in keys:
                self._makers[key].append(name)
        self._uses: defaultdict[int, dict[str, _Use]] = defaultdict(dict)  # rank -> model -> its use there
        self.hits: Counter[str] = Counter()  # model -> on all ranks, since start
        self._told: dict[int, _Told] = {}  # by rank
        self._used: defaultdict[int, set[str]] = defaultdict(set)  # rank -> models used there since then

    def note_batch(self, flight: Flight, now: float) -> None:
        """Note a batch that is sent. A request's first step of a loop counts as a hit, on each of its ranks, not what
        serves that step, as a ControlNet does.
        """
        if not flight.is_step or OPS[flight.batch.op].serves_step:
            return
        begun: dict[str, int] = {}
        for item in flight.batch.items:
            name = self._residency.models[item.model].parent or item.model
            begun[name] = begun.get(name, 0) + (item.version == 1)
        self.hits.update(begun)
        for rank in flight.batch.ranks:
            self._used[rank].update(begun)
            for name, number in begun.items():
                use = self._uses[rank].setdefault(name, _Use())
                use.used = now
                if number:
                    load = self._load(rank, name)
                    use.hits, use.load = number + (use.hits if use.load == load else 0), load

    def loads(self) -> dict[str, int]:
        """Model -> how often ranks have loaded it, since start."""
        return {name: max(map(self._residency.num_loads, steps), default=0) for name, steps in self._steps.items()}

    def on(self, rank: int) -> Iterable[RankModel]:
        """The models that a rank has, loads or could not load, as they are served: in the same order each time."""
        residency, told, used = self._residency, self._told.get(rank), self._used.pop(rank, ())
        failed, refusals = frozenset(residency.failed_on(rank)), tuple(residency.quarantine.refusals)
        state = residency.version_on(rank), failed, refusals
        if told is None or told.state != state:
            told = self._told[rank] = _Told(state, {each.model: each for each in self._rows(rank, failed)})
        else:  # as most of the time: the rows of many ranks and models are much work
            for name in told.rows.keys() & used:
                use = self._use(rank, name)
                told.rows[name] = msgspec.structs.replace(told.rows[name], hits=use.hits, used=use.used)
        return told.rows.values()

    def _rows(self, rank: int, failed: frozenset[ModelKey]) -> Iterator[RankModel]:
        residency = self._residency
        held = {each.key: each.nbytes for each in residency.components(rank)}
        awaited = residency.awaited((rank,))
        names = {name for key in chain(held, awaited) if key in self._makers for name in self._makers[key]}
        if failed:
            names.update(name for name, keys in self._all.items() if not failed.isdisjoint(keys))
        for name in sorted(names, key=self._order.__getitem__):
            steps = self._steps[name]
            has, is_loading = held.keys() >= {*steps}, not awaited.isdisjoint(steps)
            if not (has or is_loading or not failed.isdisjoint(self._all[name])):
                continue  # it has only some of what makes the model's steps
            state = self._state(name) if has else "loading" if is_loading else "quarantined"
            nbytes = sum([held.get(key, 0) for key in self._all[name]])
            loads = max([residency.num_loads(key, rank) for key in steps])
            use = self._use(rank, name)
            yield RankModel(name, state, use.hits, loads, nbytes, use.used)

    def _use(self, rank: int, name: str) -> _Use:
        """Of a model on a rank. Hits of an earlier load do not count."""
        use = self._uses[rank].get(name, _NO_USE)
        if use.hits and use.load != self._load(rank, name):
            return _Use(use.used)
        return use

    def _state(self, name: str) -> RankModelState:
        """Of a model that a rank has."""
        return "quarantined" if self._residency.is_quarantined(name) else "resident"

    def _load(self, rank: int, name: str) -> int:
        """The number of the load that a rank has the model by."""
        return max((self._residency.load_number(rank, key) for key in self._steps[name]), default=0)


_NO_USE = _Use()


def _making_steps(keys: tuple[ModelKey, ...]) -> tuple[ModelKey, ...]:
    """Those of a model's components that make its steps; of one whose steps others make, all."""
    return tuple(key for key in keys if key.component == "transformer") or keys
