"""Residency: which components each rank has, and which it is loading.

A component counts as loaded when its worker has reported it. What is loaded and dropped where is a decision of the
scheduling policy (`core.scheduling.policies.where_needed`). Ranks are in *sets* that the policy loads as one. A node
runs on any set that has all of its components; two nodes of a request may run on two sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain

from core.costs.load_report import ModelState, QuarantinedModel
from core.failure import Failure
from core.handles import LoadedComponent, ModelKey, RankIds
from core.scheduling.ranks.quarantine import FIRST_WAIT_SECONDS, Quarantine, Refusal, Suspects
from core.scheduling.requests.bindings import Bindings, ModelKeys, Needs

Started = tuple[int, Iterable[LoadedComponent]]
"""(rank, the components that its worker has loaded)"""


@dataclass(frozen=True, slots=True)
class Homes:
    """Where some components are."""

    ranks: RankIds  # that have them: those of `whole` first, in its order
    whole: tuple[RankIds, ...]  # sets all of whose ranks have them, those first that have had them for longest
    coming: tuple[RankIds, ...]  # other sets all of whose ranks have them or are loading them


class Residency:
    """One per scheduler.

    set_size: number of ranks that a policy loads as one; `num_ranks`: all ranks have the same components, except while
    they load or are restarted. sizes: predicted sizes of components that are not loaded. budget: bytes for all
    components of a rank; 0: no limit. predict: bytes -> predicted seconds of loading.
    """

    def __init__(
        self,
        bindings: Bindings,
        num_ranks: int,
        set_size: int,
        sizes: Iterable[LoadedComponent],
        budget: int,
        predict: Callable[[int], float],
    ) -> None:
        self.models = bindings.models
        self._bindings = bindings
        self.budget = budget
        self.version = 0  # of what ranks have and load
        self._versions = [0] * num_ranks  # by rank: the version with its last change
        self.has_outgrown = False  # whether a component was larger than predicted, so that its model may not fit
        self.quarantine = Quarantine()
        self._needs = {name: bindings.needs(name) for name in self.models}
        self._priming_needs = {name: (*needs, *bindings.priming(name)) for name, needs in self._needs.items()}
        self._own = frozenset(keys for needs in self._priming_needs.values() for keys in needs)
        self._set_size = set_size
        self._sizes = {each.key: each.nbytes for each in sizes}
        self._predict = predict
        # By rank: its components by key; None: its worker is dead.
        self._components: list[dict[ModelKey, LoadedComponent] | None] = [{} for _ in range(num_ranks)]
        # By rank: what it is loading, in this order.
        self._awaited: list[dict[ModelKey, None]] = [{} for _ in range(num_ranks)]
        self._since: dict[tuple[int, ModelKey], int] = {}  # (rank, its component) -> number of its load
        self._num_loads = 0
        self._loads: Counter[tuple[int, ModelKey]] = Counter()  # (rank, component) -> its loads since start
        self._all_loads: Counter[ModelKey] = Counter()  # the same, of all ranks together
        self._uses: dict[ModelKey, tuple[int, float]] = {}  # component -> number and time of its last use
        self._num_uses = 0
        self._on_demand: dict[ModelKeys, None] = {}  # of no model's own needs: what requests have asked for
        self._copies: Counter[ModelKey] = Counter()  # component -> live ranks that have it or are loading it
        self._full: set[RankIds] = set()  # see `note_full`
        self._retired: set[ModelKey] = set()  # see `retire`
        # Computed when asked for, until it changes.
        self._is_complete: bool | None = None
        self._sets: tuple[RankIds, ...] | None = None
        self._homes: dict[ModelKeys, Homes] = {}
        self._users: dict[ModelKey, set[ModelKeys]] = {}  # component -> keys of `_homes` that contain it
        self._present: dict[RankIds, frozenset[ModelKey]] = {}
        self._missing: dict[Needs, list[ModelKeys]] = {}
        self._all_there: tuple[Needs, ...] | None = None  # see `are_there`; None: it is not known

    # ------------------------------------------------------------------------------------------------- notes

    def join_all(self, started: Iterable[Started]) -> None:
        """Note workers that have started."""
        for rank, components in started:
            self.join(rank, components)

    def join(self, rank: int, components: Iterable[LoadedComponent]) -> None:
        """Note a worker that has started, and the components that it has loaded."""
        self.lose(rank)
        self._components[rank] = {}
        for loaded in components:
            self.note_loaded(rank, loaded)

    def lose(self, rank: int) -> None:
        """Note that a worker has died. Its answers to load orders are not awaited any more."""
        self._copies.subtract(self._on(rank))
        self._components[rank], self._awaited[rank] = None, {}
        self._sets = None
        self._homes.clear()
        self._users.clear()
        self._present.clear()
        self._full.clear()
        self._note_change()

    def note_loaded(self, rank: int, loaded: LoadedComponent) -> None:
        """Note a component that a worker has loaded."""
        is_larger, self._sizes[loaded.key] = loaded.nbytes > self.size_of(loaded.key), loaded.nbytes
        self.has_outgrown |= is_larger and self._may_not_fit()
        if (components := self._components[rank]) is not None:
            self._copies[loaded.key] += loaded.key not in self._on(rank)
            if loaded.key not in components:
                self._num_loads += 1
                self._since[rank, loaded.key] = self._num_loads
                self._loads[rank, loaded.key] += 1
                self._all_loads[loaded.key] += 1
            components[loaded.key] = loaded
            self._awaited[rank].pop(loaded.key, None)
            self._note_good_load(rank, loaded.key)
        self._note_change(rank, (loaded.key,))

    def _may_not_fit(self) -> bool:
        """Whether a model, with all that was loaded on demand, exceeds the budget."""
        on_demand = keys_of(self._on_demand)
        return any(self.excess(on_demand, {*keys_of(needs)}) > 0 for needs in self._needs.values())

    def _note_good_load(self, rank: int, key: ModelKey) -> None:
        ranks = next(ranks for ranks in self.sets if rank in ranks)
        if not self._unloaded((key,), ranks):
            if self.quarantine.has_failed_to_load((key,)):
                self._full.clear()  # other sets may have room for what was not loaded without a request until now
            self.quarantine.note_loaded(self._place(ranks), key)

    def note_failed(self, rank: int, key: ModelKey, failure: Failure, now: float) -> Refusal:
        """Note a component that a worker could not load, and that is refused for a while."""
        if key in self._awaited[rank]:
            del self._awaited[rank][key]
            self._copies[key] -= key not in self._on(rank)
        refusal = self.quarantine.note_failed_load(self._place((rank,)), key, failure, now)
        self._note_refused(rank, key)
        return refusal

    def note_death_in_load(
        self, rank: int, key: ModelKey, suspects: Suspects, failure: Failure, now: float
    ) -> Refusal | None:
        """Note that a rank has died while it loaded a component. See `Quarantine.note_death_in_load`."""
        refusal = self.quarantine.note_death_in_load(self._place((rank,)), key, suspects, failure, now)
        if refusal is None:
            self._note_change(rank, (key,))
        else:
            self._note_refused(rank, key)
        return refusal

    def _note_refused(self, rank: int, key: ModelKey) -> None:
        """Note that a component is refused, and so is not loaded without a request any more. Where a set has what
        requests have asked for, or is loading it, they go on, see `is_refused`.
        """
        self._note_change(rank, (key,))
        for keys in [each for each in self._on_demand if key in each.keys]:
            homes = self.homes(keys)
            if not homes.whole and not homes.coming:
                del self._on_demand[keys]

    def note_sent(self, ranks: RankIds, load: Iterable[ModelKey], drop: Iterable[ModelKey]) -> None:
        """Note an order that is sent to live ranks: to drop components, and then to load others."""
        load, drop = tuple(load), tuple(drop)
        for rank in ranks:
            components = self._components[rank]
            assert components is not None, f"rank {rank} is dead"
            before = self._on(rank)
            for key in drop:
                components.pop(key, None)
            self._awaited[rank].update(dict.fromkeys(load))
            after = self._on(rank)
            self._copies.subtract(before - after)
            self._copies.update(after - before)
            self._note_change(rank, (*load, *drop))

    def note_wanted(self, needs: Needs) -> None:
        """Note the needs of a new request."""
        for keys in needs:
            if keys not in self._own and keys not in self._on_demand:
                self._on_demand[keys] = None
                self._full.clear()
                self._note_change()

    def note_named(self, named: Iterable[LoadedComponent]) -> None:
        """Note components that requests may need from now on, with their predicted bytes, 0: unknown."""
        for each in named:
            self._retired.discard(each.key)
            self._sizes.setdefault(each.key, each.nbytes)
        self._note_change()

    def retire(self, gone: Set[ModelKey]) -> None:
        """Note classes that no request needs, nor will. See `take_retired`."""
        self._retired |= gone
        for keys in [keys for keys in (*self._on_demand, *self._homes) if not gone.isdisjoint(keys.keys)]:
            self._on_demand.pop(keys, None)
            self._homes.pop(keys, None)
        for key in gone:
            self._users.pop(key, None)
        self._note_change()

    def take_retired(self) -> list[tuple[int, tuple[ModelKey, ...]]]:
        """(rank, its components that are to be dropped at once, because they are retired). What a rank is loading is
        dropped when it has answered. Retired ones that no rank has are forgotten.
        """
        if not self._retired:
            return []
        up = [rank for ranks in self.sets for rank in ranks]
        for key in self._retired.difference(*map(self._on, up)):
            self._forget(key)
        mine = [(rank, self._components_on(rank).keys() & self._retired - self._awaited[rank].keys()) for rank in up]
        return [(rank, tuple(sorted(drop, key=lambda key: key.content))) for rank, drop in mine if drop]

    def _forget(self, key: ModelKey) -> None:
        self._retired.discard(key)
        self.quarantine.forget(key)
        for known in (self._sizes, self._uses, self._copies, self._users, self._all_loads):
            known.pop(key, None)
        for place in [place for place in self._since if place[1] == key]:
            del self._since[place], self._loads[place]

    def note_use(self, used: ModelKeys, now: float) -> None:
        """Note that a batch uses these components."""
        self._num_uses += 1
        for key in used.keys:
            self._uses[key] = self._num_uses, now

    def note_full(self, ranks: RankIds) -> None:
        """Note that a set has no room for more without a request, until something of it changes. Not noted where a load
        has failed, which is to be tried again.
        """
        if not self.quarantine.has_failed_at(self._place(ranks)):
            self._full.add(ranks)

    def _note_change(self, rank: int | None = None, keys: Iterable[ModelKey] = ()) -> None:
        """Note that these components of a rank have changed; None: of any."""
        self.version += 1
        for changed in range(len(self._versions)) if rank is None else (rank,):
            self._versions[changed] = self.version
        self._is_complete = None
        self._missing.clear()
        self._all_there = None
        for user in [user for key in keys for user in self._users.get(key, ())]:
            self._homes.pop(user, None)
        for ranks in [ranks for ranks in self._present if rank in ranks]:
            del self._present[ranks]
        self._full = {ranks for ranks in self._full if rank not in ranks}

    # ------------------------------------------------------------------------------------------------- where it is

    @property
    def sets(self) -> tuple[RankIds, ...]:
        """The live ranks in the sets that are loaded as one, ascending."""
        if self._sets is None:
            up = [rank for rank, components in enumerate(self._components) if components is not None]
            sets: dict[int, list[int]] = {}
            for rank in up:
                sets.setdefault(rank // self._set_size, []).append(rank)
            self._sets = tuple(map(tuple, sets.values()))
        return self._sets

    def _place(self, ranks: RankIds) -> int:
        """The number of the set that these ranks are in."""
        return ranks[0] // self._set_size

    def homes(self, wanted: ModelKeys) -> Homes:
        """Where these components are."""
        found = self._homes.get(wanted)
        if found is None:
            keys, up = set(wanted.keys), [rank for ranks in self.sets for rank in ranks]

            def age(ranks: RankIds) -> int:
                return max((self._since[rank, key] for rank in ranks for key in keys), default=0)

            having = {rank for rank in up if self._components_on(rank).keys() >= keys}
            expecting = {rank for rank in up if rank in having or self._on(rank) >= keys}
            whole = tuple(sorted((ranks for ranks in self.sets if having.issuperset(ranks)), key=age))
            coming = tuple(ranks for ranks in self.sets if expecting.issuperset(ranks) and not having.issuperset(ranks))
            others = sorted(having.difference(*whole))
            found = self._homes[wanted] = Homes((*chain.from_iterable(whole), *others), whole, coming)
            for key in wanted.keys:
                self._users.setdefault(key, set()).add(wanted)
        return found

    def has(self, wanted: ModelKeys, ranks: Iterable[int]) -> bool:
        """Whether all of these ranks have these components."""
        if self.is_complete:  # most of the time
            return None not in [self._components[rank] for rank in ranks]
        having = self.homes(wanted).ranks
        return all(rank in having for rank in ranks)

    def present(self, ranks: RankIds) -> frozenset[ModelKey]:
        """Components that any rank of a set has or is loading."""
        found = self._present.get(ranks)
        if found is None:
            found = self._present[ranks] = frozenset().union(*map(self._on, ranks))
        return found

    def lacking(self, keys: Iterable[ModelKey], ranks: RankIds) -> list[ModelKey]:
        """Those of these components that any of these live ranks neither has nor is loading."""
        mine = [self._on(rank) for rank in ranks]
        return [key for key in keys if not all(key in components for components in mine)]

    def has_copy(self, key: ModelKey, ranks: RankIds) -> bool:
        """Whether ranks beside these have a component, or are loading it."""
        return self._copies[key] > sum(key in self._on(rank) for rank in ranks)

    def is_loading(self, ranks: RankIds) -> bool:
        """Whether any of these ranks is loading anything."""
        return any(self._awaited[rank] for rank in ranks)

    def loading_now(self, rank: int) -> ModelKey | None:
        """The component that a rank is loading, before others that it was told to load."""
        return next(iter(self._awaited[rank]), None)

    def awaited(self, ranks: RankIds) -> set[ModelKey]:
        """What any of these ranks is loading."""
        return set().union(*(self._awaited[rank] for rank in ranks))

    def is_full(self, ranks: RankIds) -> bool:
        """Whether there was no room for more without a request when its components last changed."""
        return ranks in self._full

    def components(self, rank: int) -> tuple[LoadedComponent, ...]:
        """The components that a rank has loaded."""
        return tuple(self._components_on(rank).values())

    def version_on(self, rank: int) -> int:
        """Changes whenever a rank begins to load, has loaded or has dropped components, or what it could not load."""
        return self._versions[rank]

    def num_loads(self, key: ModelKey, rank: int | None = None) -> int:
        """How often a rank has loaded a component since the start; None: all ranks together."""
        return self._all_loads[key] if rank is None else self._loads[rank, key]

    def load_number(self, rank: int, key: ModelKey) -> int:
        """The number of the load that a rank has, or had, a component by; 0: it never had it."""
        return self._since.get((rank, key), 0)

    def failed_on(self, rank: int) -> set[ModelKey]:
        """What could not be loaded on a rank's set since all of it last had it."""
        return self.quarantine.failed_at(self._place((rank,)))

    # ------------------------------------------------------------------------------------------------- what is asked

    def refusal_of_loads(self, needs: Needs, now: float, rank: int | None = None) -> Refusal | None:
        """Why what is missing of these components cannot be loaded; None: nothing is missing, it can be loaded, or it
        is time to try again. rank: the only one that can make steps; None: any can.
        """
        missing = self.missing(needs) if rank is None else self.missing_for(needs, rank)
        if not missing:
            return None
        keys = keys_of(needs)
        if self.budget and (nbytes := sum(map(self.size_of, keys))) > self.budget:
            failure = Failure("config", f"its weights take {nbytes} bytes, and --model-bytes allows {self.budget}")
            return Refusal(tuple(keys), "load", None, failure, 1, now, now + FIRST_WAIT_SECONDS)
        found = (self._refusal_of_load(each, now, rank if each.makes_steps else None) for each in missing)
        return next(filter(None, found), None)

    def _refusal_of_load(self, needed: ModelKeys, now: float, rank: int | None) -> Refusal | None:
        """Why no set with this rank loads these together now: the refusal that ends first. rank: None: any set."""
        sets = [ranks for ranks in self.sets if rank is None or rank in ranks]
        if not sets:
            return self.quarantine.refusal_of_loads(needed.keys, None, now)
        found: list[Refusal] = []
        for ranks in sets:
            refusal = self.refusal_on(ranks, needed.keys, now)
            if refusal is None:
                return None
            found.append(refusal)
        return min(found, key=lambda refusal: refusal.until)

    def refusal_on(self, ranks: RankIds, keys: Iterable[ModelKey], now: float) -> Refusal | None:
        """Why those of these components are not loaded on a set now that it lacks; None: they may be."""
        return self.quarantine.refusal_of_loads(self.lacking(keys, ranks), self._place(ranks), now)

    def is_refused(self, refusal: Refusal, needs: Needs, owner: str | None) -> bool:
        """Whether a refusal is of an owner's requests with these needs. What could not be loaded on one set may be on
        another, or be on its way there. owner: None: of all owners' requests.
        """
        if refusal.cause == "load":
            return refusal.is_of((keys for keys in self.missing(needs) if not self.homes(keys).coming), owner)
        return refusal.is_of(needs, owner)

    def refused(self, refusal: Refusal) -> list[str]:
        """The models, adapters included, whose own needs are refused."""
        of_models = self._needs if refusal.cause == "load" else self._priming_needs
        return [name for name, needs in of_models.items() if self.is_refused(refusal, needs, refusal.owner)]

    def steered_by(self, keys: Iterable[ModelKey]) -> list[str]:
        """The models, adapters included, that have all of these components as ControlNets."""
        wanted = set(keys)
        return [name for name, info in self.models.items() if wanted.issubset(info.controlnets.values())]

    def classes_of(self, keys: Iterable[ModelKey]) -> list[str]:
        """Names of users' classes that are one of these components."""
        wanted = set(keys)
        return [name for name, each in self._bindings.classes.items() if each.key in wanted]

    def refused_models(self) -> dict[str, float]:
        """Model -> until when all requests of it are refused, monotonic seconds."""
        found: dict[str, float] = {}
        for refusal in self.quarantine.refusals:
            for name in self.refused(refusal) if refusal.owner is None else ():
                found[name] = max(refusal.until, found.get(name, 0.0))
        return found

    def quarantined(self) -> tuple[QuarantinedModel, ...]:
        """The models, without adapters, of which all or ControlNets are refused, or were and have not run since; and
        users' classes.
        """
        found = list[QuarantinedModel]()
        for each in self.quarantine.refusals:
            facts = each.cause, each.times, each.since, each.until
            for name in (*self.refused(each), *self.steered_by(each.keys)):
                if not self.models[name].parent:
                    nets = self.models[name].controlnets_of(each.keys)
                    found.append(QuarantinedModel(name, *facts, nets))
            found += [QuarantinedModel(name, *facts) for name in self.classes_of(each.keys)]
        return tuple(found)

    def has_failed(self, keys: Iterable[ModelKey]) -> bool:
        """Whether a load of any of these components has failed since it was last loaded anywhere."""
        return self.quarantine.has_failed_to_load(keys)

    def has_failed_on(self, ranks: RankIds, keys: Iterable[ModelKey]) -> bool:
        """Whether a load of any of these components has failed on a set since all of it last had it."""
        return self.quarantine.has_failed_at(self._place(ranks), keys)

    def missing(self, needs: Needs) -> Sequence[ModelKeys]:
        """Those of these that no set has."""
        found = self._missing.get(needs)
        if found is None:
            found = self._missing[needs] = [keys for keys in needs if not self.homes(keys).whole]
        return found

    def are_there(self, every: tuple[Needs, ...]) -> bool:
        """Whether nothing of all these is missing. It is fast for the same object as at the last call."""
        if every is not self._all_there and not any(map(self.missing, every)):
            self._all_there = every
        return every is self._all_there

    def missing_for(self, needs: Needs, rank: int) -> list[ModelKeys]:
        """Those of these that no set has, and of those that make steps those that the set of a rank has not."""
        return [
            keys for keys in needs if not any(rank in ranks or not keys.makes_steps for ranks in self.homes(keys).whole)
        ]

    def seconds_left(self, needs: Needs) -> float:
        """Predicted seconds of loading what no set has."""
        missing, sets = self.missing(needs), self.sets
        if not missing or not sets:
            return 0.0
        keys = keys_of(missing)
        return min(sum(map(self.load_seconds, self._unloaded(keys, ranks))) for ranks in sets)

    def _unloaded(self, keys: Iterable[ModelKey], ranks: RankIds) -> list[ModelKey]:
        mine = [self._components_on(rank) for rank in ranks]
        return [key for key in keys if not all(key in components for components in mine)]

    def states(self) -> dict[str, ModelState]:
        """Model -> state of its weights, for all models but adapters."""
        return {name: self._state(name) for name, info in self.models.items() if not info.parent}

    def is_quarantined(self, model: str) -> bool:
        """Whether a model is refused to everybody because its batches have ended ranks."""
        needs = self._priming_needs[model]
        return any(each.cause == "deaths" and each.is_of(needs, None) for each in self.quarantine.refusals)

    def _state(self, name: str) -> ModelState:
        if self.is_quarantined(name):
            return "quarantined"
        missing = self.missing(self._needs[name])
        if not missing:
            return "loaded"
        keys = keys_of(missing)
        if any(not awaited.keys().isdisjoint(keys) for awaited in self._awaited):
            return "loading"
        return "failed" if self.has_failed(keys) else "unloaded"

    def needs_of(self, model: str) -> Needs:
        """What a model's requests compute with, but for those whose mask is to be found."""
        return self._needs[model]

    def priming_needs_of(self, model: str) -> Needs:
        """What a model's requests compute with, and what its templates are primed with."""
        return self._priming_needs[model]

    @property
    def is_complete(self) -> bool:
        """Whether everything is loaded on all ranks that live, of what is loaded on demand as far as it was needed."""
        if self._is_complete is None:
            up = [components for components in self._components if components is not None]
            everything = {key for needs in self.idle_needs for key in keys_of(needs)}
            self._is_complete = not any(self._awaited) and all(mine.keys() >= everything for mine in up)
        return self._is_complete

    @property
    def idle_needs(self) -> Iterator[Needs]:
        """What is loaded without any request, while there is room: models, and what was loaded on demand before."""
        yield from dict.fromkeys(self._needs.values())
        yield from ((keys,) for keys in self._on_demand)

    def excess(self, further: Iterable[ModelKey], present: Set[ModelKey]) -> int:
        """Bytes by which these components and the present ones together would exceed the budget; at most 0: there is
        room.
        """
        return sum(map(self.size_of, present | {*further})) - self.budget if self.budget else 0

    def load_seconds(self, key: ModelKey) -> float:
        """Predicted seconds of loading a component; 0 if none was loaded yet."""
        return self._predict(self.size_of(key))

    def size_of(self, key: ModelKey) -> int:
        """Bytes of a component; predicted until it has been loaded once."""
        return self._sizes.get(key, 0)

    def last_use(self, key: ModelKey) -> int:
        """A number that grows with the time of a component's last use; 0: it was not used yet."""
        return self._uses.get(key, (0, 0.0))[0]

    def used(self, key: ModelKey) -> float:
        """When a component was used last, monotonic seconds; 0: it was not used yet."""
        return self._uses.get(key, (0, 0.0))[1]

    def _on(self, rank: int) -> set[ModelKey]:
        """What a rank has or is loading."""
        return self._components_on(rank).keys() | self._awaited[rank].keys()

    def _components_on(self, rank: int) -> Mapping[ModelKey, LoadedComponent]:
        """A rank's components by key; empty if its worker is dead."""
        components = self._components[rank]
        return {} if components is None else components


def keys_of(needs: Iterable[ModelKeys]) -> list[ModelKey]:
    """Their components, each once."""
    return list(dict.fromkeys(key for each in needs for key in each.keys))
