"""Where needed: which components are loaded where, and which are dropped to make room.

A component is loaded where it is needed: for the most urgent request first, on the set of ranks where the least is
dropped for it, and of equals where that was used least recently. What a set has is not loaded on another one for a
request, unless the policy wants a copy. When a component needs room, others are dropped that no live request needs
there: copies before the only one, the least recently used first. If all of them are needed, the request that waits for
room lets later requests go ahead whose models are loaded, for about as long as its own model takes to load; after that
no other request begins before it. What no request needs is loaded while there is room: models that no set has, and then
copies of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from core.handles import ModelKey, RankIds
from core.messages.worker import Load
from core.scheduling.dispatch import Copy, Loads
from core.scheduling.model_demand import ModelDemand
from core.scheduling.ranks.residency import Residency, keys_of
from core.scheduling.requests.bindings import ModelKeys, Needs

LEAST_PATIENCE_SECONDS = 1.0
"""Least time during which later requests go ahead of one whose model has no room."""

MOST_LOOKED_AT = 256
"""Number of the most urgent waiting requests that decide what is loaded."""


def where_needed(demand: ModelDemand, now: float, copies: Sequence[Copy] = ()) -> Loads:
    """The rule above. copies: that the policy wants."""
    residency = demand.residency
    has_room = any(not residency.is_loading(each) and not residency.is_full(each) for each in residency.sets)
    if not copies and not has_room and not demand.has_missing:
        return Loads()
    templates = ((needs, None, arrival) for needs, arrival in demand.templates())
    waiting = chain(islice(demand.waiting(), MOST_LOOKED_AT), templates)
    return _LoadPass(demand.residency, now).run(demand.in_use(), demand.behind_others(), waiting, copies)


@dataclass(slots=True)
class _Room:
    """Where components can be loaded."""

    ranks: RankIds
    load: list[ModelKey]
    drop: list[ModelKey]
    # Bytes to drop, bytes to load, what is dropped that is worth most, bytes that are there; the least is best.
    cost: tuple[int, int, tuple[bool, int], int]


@dataclass(slots=True)
class _LoadPass:
    """One decision; `run` is called once."""

    residency: Residency
    now: float
    _kept: dict[RankIds, set[ModelKey]] = field(default_factory=dict)  # set of ranks -> what is needed there
    _orders: dict[RankIds, Load] = field(default_factory=dict)  # by set of ranks
    _seen: set[tuple[Needs, int | None]] = field(default_factory=set)
    _startable: set[ModelKeys] = field(default_factory=set)
    _needed: set[ModelKeys] = field(default_factory=set)  # by requests that were considered

    def run(
        self,
        in_use: Iterable[tuple[Needs, int | None]],
        behind_others: Iterable[Needs],
        waiting: Iterable[tuple[Needs, int | None, float]],
        copies: Iterable[Copy],
    ) -> Loads:
        """Consider what running requests need, who may lack components after a rank's death, those that wait for
        others in the cache after these; then what requests wait for; and unless a request has lost patience, copies,
        and what no request needs.
        """
        lacking = []
        for needs, rank in in_use:
            if self._nowhere(needs, rank):
                lacking.append((needs, rank))
            else:
                self._keep(needs, rank)
        for needs, rank in lacking:  # nothing is kept for the later ones yet, or all of them might wait for each other
            self._restore(needs, rank)
        for needs in behind_others:
            self._restore(needs, None)
        soonest: float | None = None  # when the first request loses patience
        for needs, rank, arrival in waiting:
            if (needs, rank) in self._seen:
                continue
            patience_ends = self._consider(needs, rank, arrival)
            if patience_ends is not None:
                if patience_ends <= self.now:
                    return Loads(tuple(self._orders.values()), frozenset(self._startable))
                soonest = patience_ends if soonest is None else min(soonest, patience_ends)
        for needs, rank in copies:
            self._consider_copy(needs, rank)
        self._consider_idle()
        return Loads(tuple(self._orders.values()), None, soonest)

    # ------------------------------------------------------------------------------------------------- requests

    def _nowhere(self, needs: Needs, rank: int | None = None) -> list[ModelKeys]:
        """Those of these that no set has, or will have. rank: the only one that can make steps."""
        return [keys for keys in needs if self._home(keys, rank) is None]

    def _keep(self, needs: Needs, rank: int | None = None) -> None:
        """Note that these are needed where they are, or are being loaded. rank: the only one that can make steps."""
        self._needed.update(needs)
        for keys in needs:
            if (home := self._home(keys, rank)) is not None:
                self._kept.setdefault(home, set()).update(keys.keys)

    def _home(self, keys: ModelKeys, rank: int | None = None) -> RankIds | None:
        """The first set that has these components, or else that will have them; None: there is none. rank: one that
        the set must contain, if steps are made with them.
        """
        homes, goes_anywhere = self.residency.homes(keys), rank is None or not keys.makes_steps
        for ranks in (*homes.whole, *homes.coming):
            if (goes_anywhere or rank in ranks) and not self._drops(keys, ranks):
                return ranks
        return next((ranks for ranks in self._orders if not self._lacking(keys.keys, ranks)), None)

    def _is_there(self, needs: Needs) -> bool:
        """Whether each of these is in some set now, and stays there."""
        homes = self.residency.homes
        return all(any(not self._drops(keys, ranks) for ranks in homes(keys).whole) for keys in needs)

    def _drops(self, keys: ModelKeys, ranks: RankIds) -> bool:
        """Whether this pass drops any of these components from a set."""
        order = self._orders.get(ranks)
        return order is not None and not set(order.drop).isdisjoint(keys.keys)

    def _lacking(self, keys: Iterable[ModelKey], ranks: RankIds) -> list[ModelKey]:
        """Those of these components that a set lacks, or will lack after this pass's orders."""
        order = self._orders.get(ranks)
        if order is None:
            return self.residency.lacking(keys, ranks)
        keys = list(keys)
        lacking = {*self.residency.lacking(keys, ranks), *order.drop} - {*order.load}
        return [key for key in keys if key in lacking]

    def _restore(self, needs: Needs, rank: int | None) -> None:
        """Load what a running request lacks. Other models wait, because its requests go first."""
        self._keep(needs, rank)
        missing = self._nowhere(needs, rank)
        if missing and self.residency.refusal_of_loads(needs, self.now, rank) is None:
            self._load(missing, self._rooms(missing, rank))

    def _consider(self, needs: Needs, rank: int | None, arrival: float) -> float | None:
        """Consider what a request waits for. rank: the only one that can read its pages. Returns when no later request
        may begin before it, monotonic seconds; None: they may.
        """
        self._seen.add((needs, rank))
        self._keep(needs)
        self._keep(needs, rank)
        missing = self._nowhere(needs)
        if self._is_there(needs):
            self._startable.update(needs)
        elif missing and self.residency.refusal_of_loads(needs, self.now) is None:
            rooms = self._rooms(missing)
            if not rooms and not all(map(self._is_loading, self.residency.sets)):
                return arrival + max(LEAST_PATIENCE_SECONDS, self.residency.seconds_left(needs))
            self._load(missing, rooms)
        return None

    def _consider_copy(self, needs: Needs, rank: int) -> None:
        """Consider a copy for a rank, unless the requests that needed it have ended since. Only copies are dropped for
        it, and no load is repeated that has failed there.
        """
        if not self._needed.issuperset(needs):
            return
        ranks = next((ranks for ranks in self.residency.sets if rank in ranks), None)
        room = None if ranks is None or self._is_loading(ranks) else self._room(keys_of(needs), ranks)
        if room is None or not room.load or self.residency.has_failed_on(room.ranks, room.load):
            return
        if self._may_load(room) and all(self._stays(key, room.ranks) for key in room.drop):
            self._orders[room.ranks] = Load(room.ranks, tuple(room.load), tuple(room.drop))

    def _stays(self, key: ModelKey, ranks: RankIds) -> bool:
        """Whether other sets keep a component that this one drops."""
        dropped = [order.ranks for order in self._orders.values() if key in order.drop]
        return self.residency.has_copy(key, (*ranks, *chain.from_iterable(dropped)))

    # ------------------------------------------------------------------------------------------------- without requests

    def _consider_idle(self) -> None:
        """Consider what no request waits for. Nothing is dropped for it, and failed loads are repeated rarely, and only
        after the component was loaded elsewhere.
        """
        for ranks in self.residency.sets:
            if not self._is_loading(ranks) and not self.residency.is_full(ranks):
                lacking = self._idle_load(ranks, only_new=True) or self._idle_load(ranks, only_new=False)
                if lacking:
                    self._orders[ranks] = Load(ranks, tuple(lacking))
                else:
                    self.residency.note_full(ranks)

    def _idle_load(self, ranks: RankIds, *, only_new: bool) -> list[ModelKey]:
        """What a set lacks of the first model that it has room for. only_new: of those that no set has or will have."""
        residency = self.residency
        present = residency.present(ranks)
        for needs in residency.idle_needs:
            wanted = [keys for keys in needs if self._home(keys) is None] if only_new else needs
            lacking = self._lacking(keys_of(wanted), ranks)
            if (
                lacking
                and not residency.has_failed(lacking)
                and residency.excess(lacking, present) <= 0
                and residency.refusal_on(ranks, lacking, self.now) is None
            ):
                return lacking
        return []

    # ------------------------------------------------------------------------------------------------- room

    def _is_loading(self, ranks: RankIds) -> bool:
        """Whether a set loads something. One request's components are loaded at a time: others would only be queued,
        in front of components that are more urgent by then.
        """
        return ranks in self._orders or self.residency.is_loading(ranks)

    def _load(self, missing: Sequence[ModelKeys], rooms: Sequence[_Room]) -> None:
        """Load these where it costs least, unless those sets have to end other loads before."""
        free = [room for room in rooms if not self._is_loading(room.ranks)]
        if free:
            best = min(free, key=lambda room: room.cost)
            self._orders[best.ranks] = Load(best.ranks, tuple(best.load), tuple(best.drop))
            self._kept.setdefault(best.ranks, set()).update(keys_of(missing))

    def _rooms(self, missing: Sequence[ModelKeys], rank: int | None = None) -> list[_Room]:
        """Where these can be loaded: where it has failed before only if there is nowhere else. rank: one that the set
        must contain, if steps are made with them.
        """
        needs_rank = rank is not None and any(keys.makes_steps for keys in missing)
        sets = (ranks for ranks in self.residency.sets if not needs_rank or rank in ranks)
        rooms = (self._room(keys_of(missing), ranks) for ranks in sets)
        found = [room for room in rooms if room is not None and self._may_load(room)]
        return [room for room in found if not self.residency.has_failed_on(room.ranks, room.load)] or found

    def _may_load(self, room: _Room) -> bool:
        return self.residency.refusal_on(room.ranks, room.load, self.now) is None

    def _room(self, keys: list[ModelKey], ranks: RankIds) -> _Room | None:
        """How a set has room for these; None: too much is in use."""
        residency = self.residency
        present, load = residency.present(ranks), self._lacking(keys, ranks)
        excess = residency.excess(load, present)
        drop = self._drop(excess, present - self._kept.get(ranks, set()) - {*keys}, ranks)
        if drop is None:
            return None
        sizes = [sum(map(residency.size_of, each)) for each in (drop, load, present)]
        worth = max((self._worth(key, ranks)[:2] for key in drop), default=(False, 0))
        return _Room(ranks, load, drop, (sizes[0], sizes[1], worth, sizes[2]))

    def _drop(self, excess: int, idle: Iterable[ModelKey], ranks: RankIds) -> list[ModelKey] | None:
        """The components to drop for this many bytes, of those that are not needed; None: they are too few."""
        if excess <= 0:
            return []
        size_of, awaited, drop = self.residency.size_of, self.residency.awaited(ranks), list[ModelKey]()
        for key in sorted((key for key in idle if key not in awaited), key=lambda key: self._worth(key, ranks)):
            if excess > 0:
                excess -= size_of(key)
                drop.append(key)
        for key in list(drop):
            if excess + size_of(key) <= 0:  # there is enough room without dropping it
                excess += size_of(key)
                drop.remove(key)
        return drop if excess <= 0 else None

    def _worth(self, key: ModelKey, ranks: RankIds) -> tuple[bool, int, str, str]:
        """What is worth least is dropped first."""
        residency = self.residency
        return not residency.has_copy(key, ranks), residency.last_use(key), key.component, key.content
