"""Residency: which components the ranks have, which are being loaded, and which are dropped to make room.

A component counts as loaded when its worker has reported it. Models are loaded when requests need them, the most urgent
request first, and without any request while there is room. When another component needs the room, components that no
live request needs are dropped, the least recently used first. If all of them are needed, the request that waits for
room lets later requests of loaded models go ahead, for about as long as its own model takes to load; after that no
other request begins before it. A component that only some requests of a model need, as a segmenter, is loaded for the
first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from core.costs.load_report import ModelState
from core.failure import Failure
from core.handles import LoadedComponent, ModelKey
from core.model_info import ModelInfo
from core.scheduling.requests.bindings import ModelKeys

RETRY_SECONDS = 10.0
"""Time after a failed load during which requests that need it are refused without trying again."""

LEAST_PATIENCE_SECONDS = 1.0
"""Least time during which later requests go ahead of one whose model has no room."""

MOST_LOOKED_AT = 256
"""Number of the most urgent waiting requests that decide what is loaded."""


Needs = tuple[ModelKey, ...]
"""The components that a request, or a model, needs."""

Started = tuple[int, Iterable[LoadedComponent]]
"""(rank, the components that its worker has loaded)"""


@dataclass(frozen=True, slots=True)
class ModelOrders:
    """Components that all ranks are to load and drop. Workers drop before they load."""

    load: tuple[ModelKey, ...] = ()
    unload: tuple[ModelKey, ...] = ()

    @property
    def has_any(self) -> bool:
        return bool(self.load or self.unload)


class Residency:
    """One per scheduler. All ranks have the same components, except while they load or are restarted.

    models: name -> info. sizes: predicted sizes of components that are not loaded. budget: bytes for all components of
    a rank; 0: no limit. predict: bytes -> predicted seconds of loading.
    """

    def __init__(
        self,
        models: Mapping[str, ModelInfo],
        num_ranks: int,
        sizes: Iterable[LoadedComponent],
        budget: int,
        predict: Callable[[int], float],
    ) -> None:
        self.models = models
        self._sizes = {each.key: each.nbytes for each in sizes}
        self._budget = budget
        self._predict = predict
        # By rank: its components by key; None: its worker is dead.
        self._components: list[dict[ModelKey, LoadedComponent] | None] = [{} for _ in range(num_ranks)]
        self._awaited: dict[ModelKey, set[int]] = {}  # component that is being loaded -> ranks that have not answered
        self._failed: dict[ModelKey, tuple[Failure, float]] = {}  # component -> (why its last load failed, when)
        self._uses: dict[ModelKey, int] = {}  # component -> number of its last use
        self._num_uses = 0
        self._may_start: frozenset[ModelKey] | None = None  # what waiting requests that may begin need; None: all
        self._on_demand: set[ModelKey] = set()  # components of no model's own needs that a request has asked for
        self._is_complete: bool | None = None  # None: to be computed

    # ------------------------------------------------------------------------------------------------- notes

    def join_all(self, started: Iterable[Started]) -> None:
        """Note workers that have started."""
        for rank, components in started:
            self.join(rank, components)

    def join(self, rank: int, components: Iterable[LoadedComponent]) -> None:
        """Note a worker that has started, and the components that it has loaded."""
        self._components[rank], self._is_complete = {}, None
        for loaded in components:
            self.note_loaded(rank, loaded)

    def lose(self, rank: int) -> None:
        """Note that a worker has died. Its answers to load orders are not awaited any more."""
        self._components[rank], self._is_complete = None, None
        for key in list(self._awaited):
            self._settle(key, rank)

    def note_loaded(self, rank: int, loaded: LoadedComponent) -> None:
        """Note a component that a worker has loaded."""
        self._components_on(rank)[loaded.key] = loaded
        self._sizes[loaded.key] = loaded.nbytes
        self._failed.pop(loaded.key, None)
        self._settle(loaded.key, rank)

    def note_failed(self, rank: int, key: ModelKey, failure: Failure, now: float) -> None:
        """Note a component that a worker could not load."""
        self._settle(key, rank)
        self._failed[key] = failure, now
        self._on_demand.discard(key)

    def note_wanted(self, needs: Needs) -> None:
        """Note the needs of a new request."""
        if not self._on_demand.issuperset(needs):
            further = {*needs}.difference(*(info.needs for info in self.models.values())) - self._on_demand
            self._on_demand |= further
            self._is_complete = None if further else self._is_complete

    def note_use(self, used: ModelKeys) -> None:
        """Note that a batch uses these components."""
        self._num_uses += 1
        for key in used.keys:
            self._uses[key] = self._num_uses

    # ------------------------------------------------------------------------------------------------- what is asked

    def has(self, wanted: ModelKeys, ranks: Iterable[int]) -> bool:
        """Whether all of these ranks have these components."""
        if self.is_complete:  # most of the time
            return None not in [self._components[rank] for rank in ranks]
        keys = {*wanted.keys}
        return all((components := self._components[rank]) is not None and components.keys() >= keys for rank in ranks)

    def may_start(self, needs: Needs) -> bool:
        """Whether waiting requests with these needs may begin, as of the last `order`."""
        return self._may_start is None or self._may_start.issuperset(needs)

    def failure_of(self, needs: Needs, now: float) -> Failure | None:
        """Why these components cannot be used together; None: they can, or it is time to try again."""
        if self._budget and (nbytes := sum(map(self.size_of, needs))) > self._budget:
            return Failure("config", f"its weights take {nbytes} bytes, and --model-bytes allows {self._budget}")
        for key in needs:
            failure, since = self._failed.get(key, (None, 0.0))
            if failure is not None and now - since < RETRY_SECONDS:
                return failure
        return None

    def has_failed(self, keys: Iterable[ModelKey]) -> bool:
        """Whether the last load of any of these components has failed."""
        return any(key in self._failed for key in keys)

    def seconds_left(self, needs: Needs) -> float:
        """Predicted seconds of loading those of these components that a rank lacks."""
        return sum(self._predict(self.size_of(key)) for key in self.lacking(needs))

    def components(self, rank: int) -> tuple[LoadedComponent, ...]:
        """The components that a rank has loaded."""
        return tuple(self._components_on(rank).values())

    def states(self) -> dict[str, ModelState]:
        """Model -> state of its weights, for all models but adapters."""
        return {name: self._state(info) for name, info in self.models.items() if not info.parent}

    def _state(self, info: ModelInfo) -> ModelState:
        lacking = self.lacking(info.needs)
        if not lacking:
            return "loaded"
        if any(key in self._awaited for key in lacking):
            return "loading"
        return "failed" if self.has_failed(lacking) else "unloaded"

    @property
    def is_complete(self) -> bool:
        """Whether everything is loaded on all ranks that live, of what is loaded on demand as far as it was needed."""
        if self._is_complete is None:
            self._is_complete = not self._awaited and not any(map(self.lacking, self.idle_needs))
            self._may_start = None if self._is_complete else self._may_start
        return self._is_complete

    @property
    def idle_needs(self) -> Iterator[Needs]:
        """What is loaded without any request, while there is room: models, and what was loaded on demand before."""
        yield from (info.needs for info in self.models.values())
        yield from ((key,) for key in self._on_demand)

    @property
    def is_loading(self) -> bool:
        """Whether any component is being loaded."""
        return bool(self._awaited)

    # ------------------------------------------------------------------------------------------------- decisions

    def order(self, running: Iterable[Needs], waiting: Iterable[tuple[Needs, float]], now: float) -> ModelOrders:
        """The components to load and drop now. running: what is in use. waiting: (needs, arrival) of the other
        requests, the most urgent first.
        """
        if self.is_complete:
            return ModelOrders()
        load_pass = _LoadPass(self, running, now)
        load_pass.run(islice(waiting, MOST_LOOKED_AT))
        self._may_start = frozenset(load_pass.startable)
        self._note_sent(load_pass.orders)
        return load_pass.orders

    def lacking(self, needs: Needs) -> list[ModelKey]:
        """Those of these components that any live rank lacks."""
        up = [components for components in self._components if components is not None]
        return [key for key in needs if not all(key in components for components in up)]

    def excess(self, further: Iterable[ModelKey]) -> int:
        """Bytes by which these components and the present ones together would exceed the budget; at most 0: there is
        room.
        """
        return sum(map(self.size_of, self.present.union(further))) - self._budget if self._budget else 0

    @property
    def present(self) -> set[ModelKey]:
        """Components that any rank has or is loading."""
        return set(self._awaited).union(*(components for components in self._components if components is not None))

    def size_of(self, key: ModelKey) -> int:
        """Bytes of a component; predicted until it has been loaded once."""
        return self._sizes.get(key, 0)

    def least_used(self, keys: Iterable[ModelKey]) -> list[ModelKey]:
        """These components, the least recently used first."""
        return sorted(keys, key=lambda key: (self._uses.get(key, 0), key.component, key.content))

    # ------------------------------------------------------------------------------------------------- inside

    def _note_sent(self, orders: ModelOrders) -> None:
        """Note orders that are sent to all ranks."""
        up = [rank for rank, components in enumerate(self._components) if components is not None]
        for key in orders.unload:
            for rank in up:
                self._components_on(rank).pop(key, None)
        for key in orders.load:
            self._awaited[key] = set(up)
        self._is_complete = None

    def _components_on(self, rank: int) -> dict[ModelKey, LoadedComponent]:
        """A rank's components by key; empty if its worker is dead."""
        components = self._components[rank]
        return {} if components is None else components

    def _settle(self, key: ModelKey, rank: int) -> None:
        """Note that a rank's answer to a load order has come or will not come."""
        self._is_complete = None
        waits_for = self._awaited.get(key)
        if waits_for is not None:
            waits_for.discard(rank)
            if not waits_for:
                del self._awaited[key]


class _LoadPass:
    """One decision about what to load and drop; `run` is called once."""

    def __init__(self, residency: Residency, running: Iterable[Needs], now: float) -> None:
        self._residency = residency
        self._now = now
        self._running = list(running)
        self._needed = {key for needs in self._running for key in needs}  # not dropped
        self._seen: set[Needs] = set()
        self._is_loading = residency.is_loading
        self.startable: set[ModelKey] = set()
        self.orders = ModelOrders()

    def run(self, waiting: Iterable[tuple[Needs, float]]) -> None:
        """Consider what running requests need, who may lack components after a rank's death; then what requests wait
        for; and unless a request has lost patience, what no request needs.
        """
        for needs in self._running:
            self._restore(needs)
        for needs, arrival in waiting:
            if needs not in self._seen and not self._consider(needs, arrival):
                return
        for needs in self._residency.idle_needs:
            if needs not in self._seen:
                self._consider_idle(needs)

    def _restore(self, needs: Needs) -> None:
        """Load the components that a running request lacks. Other models wait, because its requests go first."""
        lacking = self._lacking(needs)
        if lacking and self._may_load(needs) and (dropped := self._room_for(needs, lacking)) is not None:
            self._load(lacking, dropped)

    def _consider(self, needs: Needs, arrival: float) -> bool:
        """Consider what a request waits for; False: no later request may begin before that one."""
        self._seen.add(needs)
        lacking = self._lacking(needs)
        if not lacking:
            self.startable.update(needs)
        elif self._may_load(needs):
            dropped = self._room_for(needs, lacking)
            if dropped is None:
                patience = max(LEAST_PATIENCE_SECONDS, self._residency.seconds_left(needs))
                return self._now - arrival < patience
            self._load(lacking, dropped)
        self._needed.update(needs)
        return True

    def _consider_idle(self, needs: Needs) -> None:
        """Consider what no request waits for. Nothing is dropped for it, and failed loads are not repeated."""
        lacking = self._lacking(needs)
        if not lacking:
            self.startable.update(needs)
        elif self._may_load(needs) and not self._residency.has_failed(lacking) and self._residency.excess(lacking) <= 0:
            self._load(lacking, ())

    def _lacking(self, needs: Needs) -> list[ModelKey]:
        """Those of these components that a rank lacks, or will lack after these orders."""
        dropped = set(self.orders.unload).intersection(needs)
        return [*self._residency.lacking(needs), *dropped]

    def _may_load(self, needs: Needs) -> bool:
        """Whether these may be loaded now. One request's are loaded at a time: others would only be queued, in front of
        components that are more urgent by then.
        """
        return not self._is_loading and self._residency.failure_of(needs, self._now) is None

    def _load(self, lacking: Iterable[ModelKey], dropped: Iterable[ModelKey]) -> None:
        self.orders = ModelOrders(tuple(lacking), tuple(dropped))
        self._is_loading = True

    def _room_for(self, needs: Needs, lacking: Iterable[ModelKey]) -> list[ModelKey] | None:
        """The components to drop for these; None: too many are in use."""
        residency, missing = self._residency, self._residency.excess(lacking)
        idle = residency.present - self._needed.union(needs)
        dropped: list[ModelKey] = []
        for key in residency.least_used(idle):
            if missing <= 0:
                break
            missing -= residency.size_of(key)
            dropped.append(key)
        for key in list(dropped):
            if missing + residency.size_of(key) <= 0:  # there is enough room without dropping it
                missing += residency.size_of(key)
                dropped.remove(key)
        return dropped if missing <= 0 else None
