"""ModelUses: which models each rank has, and how often requests have made their steps with them there.

A rank has a model if it has the components that make the model's steps: a text encoder or VAE may be on another rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from core.costs.load_report import RankModel, RankModelState
from core.handles import ModelKey
from core.scheduling.ranks.in_flight import Flight
from core.scheduling.ranks.residency import Residency


class ModelUses:
    """One per scheduler, in its Ranks. Of models without adapters, whose uses are their model's."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._all = {name: info.components for name, info in residency.models.items() if not info.parent}
        self._steps = {name: _making_steps(keys) for name, keys in self._all.items()}
        self._users: defaultdict[ModelKey, list[str]] = defaultdict(list)  # component -> the models that need it
        for name, keys in self._all.items():
            for key in keys:
                self._users[key].append(name)
        self._hits: Counter[tuple[int, str]] = Counter()  # (rank, model) -> since it was loaded there
        self._load_of: dict[tuple[int, str], int] = {}  # the same -> the number of that load
        self._used: dict[tuple[int, str], float] = {}  # the same -> monotonic seconds
        self.hits: Counter[str] = Counter()  # model -> on all ranks, since start

    def note_batch(self, flight: Flight, now: float) -> None:
        """Note a batch that is sent. A request's first step of a loop counts as a hit, on each of its ranks."""
        if not flight.is_step:
            return
        names = [self._residency.models[item.model].parent or item.model for item in flight.batch.items]
        begun = Counter(name for name, item in zip(names, flight.batch.items, strict=True) if item.version == 1)
        self.hits.update(begun)
        for rank in flight.batch.ranks:
            self._used.update(dict.fromkeys(((rank, name) for name in names), now))
            for name, number in begun.items():
                self._hits[rank, name] = self._hits_on(rank, name) + number
                self._load_of[rank, name] = self._load(rank, name)

    def loads(self) -> dict[str, int]:
        """Model -> how often ranks have loaded it, since start."""
        return {name: sum(map(self._residency.num_loads, steps)) for name, steps in self._steps.items()}

    def on(self, rank: int) -> Iterator[RankModel]:
        """The models that a rank has, loads or could not load."""
        residency = self._residency
        held = {each.key: each.nbytes for each in residency.components(rank)}
        known = held.keys() | residency.awaited((rank,)) | residency.failed_on(rank)
        for name in dict.fromkeys(name for key in known for name in self._users[key]):
            if (state := self._state(rank, name, held)) is not None:
                nbytes = sum(held.get(key, 0) for key in self._all[name])
                loads = max(residency.num_loads(key, rank) for key in self._steps[name])
                used = self._used.get((rank, name), 0.0)
                yield RankModel(name, state, self._hits_on(rank, name), loads, nbytes, used)

    def _state(self, rank: int, name: str, held: dict[ModelKey, int]) -> RankModelState | None:
        """None: the rank does not have it, and does not try to."""
        residency, steps = self._residency, self._steps[name]
        has, awaited = held.keys() >= set(steps), residency.awaited((rank,))
        is_loading = any(key in awaited for key in steps)
        if not residency.failed_on(rank).isdisjoint(self._all[name]) and not (has or is_loading):
            return "quarantined"
        if not has:
            return "loading" if is_loading else None
        return "quarantined" if residency.is_quarantined(name) else "resident"

    def _hits_on(self, rank: int, name: str) -> int:
        return self._hits[rank, name] if self._load_of.get((rank, name)) == self._load(rank, name) else 0

    def _load(self, rank: int, name: str) -> int:
        """The number of the load that a rank has the model by."""
        return max((self._residency.load_number(rank, key) for key in self._steps[name]), default=0)


def _making_steps(keys: tuple[ModelKey, ...]) -> tuple[ModelKey, ...]:
    """Those of a model's components that make its steps; of one whose steps others make, all."""
    return tuple(key for key in keys if key.component == "transformer") or keys
