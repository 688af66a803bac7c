"""Residency with small models, and what the rule of loads orders for given requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import msgspec
from fakes import MODEL, make_edit

from core.failure import Failure
from core.handles import LoadedComponent, ModelKey
from core.messages.engine import EngineRequest
from core.messages.worker import Load
from core.model_info import ModelInfo
from core.scheduling.dispatch import Loads
from core.scheduling.model_demand import ModelDemand
from core.scheduling.model_loads import check
from core.scheduling.node_cache import CacheJob, NodeCache
from core.scheduling.policies.where_needed import where_needed
from core.scheduling.ranks.residency import Residency
from core.scheduling.requests.bindings import Bindings, ModelKeys, Needs
from core.scheduling.requests.live_requests import LiveRequests
from core.scheduling.requests.request import Status

TEXT, VAE, SEGMENTER = ModelKey("0", "text_encoder"), ModelKey("0", "vae"), ModelKey("s", "segmenter")
BROKEN = Failure("config", "cannot load it")


def model(name: str, *components: ModelKey) -> ModelInfo:
    """A model of these components and a transformer of its own."""
    return msgspec.structs.replace(MODEL, name=name, components=(*components, ModelKey(name, "transformer")))


def transformer(name: str) -> ModelKey:
    return ModelKey(name, "transformer")


MODELS = {"a": model("a", TEXT, VAE), "b": model("b", TEXT, VAE), "c": model("c", ModelKey("c", "vae"))}


def size_of(key: ModelKey) -> int:
    return {"transformer": 10, "segmenter": 3}.get(key.component, 2)


class Rig:
    """With these models loaded on all ranks. set_size: ranks that load as one; by default all. seconds: predicted of
    every load."""

    def __init__(
        self,
        *loaded: str,
        budget: int = 0,
        ranks: int = 1,
        set_size: int = 0,
        models: dict[str, ModelInfo] = MODELS,
        seconds: float = 0.0,
    ) -> None:
        self.models = models
        self.bindings = Bindings(models)
        keys = [SEGMENTER, *(key for info in models.values() for key in info.components)]
        sizes = [LoadedComponent(key, size_of(key)) for key in keys]
        self.residency = Residency(self.bindings, ranks, set_size or ranks, sizes, budget, lambda nbytes: seconds)
        self.segmenter: Needs = (ModelKeys("", "", (SEGMENTER,)),)
        self.decided = Loads()
        for rank in range(ranks):
            self.join(rank, *loaded)

    def join(self, rank: int, *loaded: str) -> None:
        keys = dict.fromkeys(key for name in loaded for key in self.models[name].components)
        self.residency.join(rank, [LoadedComponent(key, size_of(key)) for key in keys])

    def needs(self, name: str) -> Needs:
        return self.residency.needs_of(name)

    def order(
        self,
        running: Iterable[str | tuple[Needs, int | None]] = (),
        waiting: Iterable[tuple[str | Needs, float]] = (),
        now: float = 0.0,
        copies: Iterable[tuple[str, int]] = (),
    ) -> tuple[Load, ...]:
        """What is ordered while these models are in use, or (needs, pinned rank), these requests wait, and the policy
        wants these copies: (model, rank).
        """
        used = [(self.needs(each), None) if isinstance(each, str) else each for each in running]
        requests = [_Request(needs, rank, make_edit("", arrival=0.0), Status.RUNNING) for needs, rank in used]
        for name, since in waiting:
            needs = self.needs(name) if isinstance(name, str) else name
            requests.append(_Request(needs, None, make_edit("", arrival=since), Status.WAITING))
        demand = ModelDemand(self.residency, cast(LiveRequests, _Requests(requests)), cast(NodeCache, _Cache()))
        self.decided = where_needed(demand, now, [(self.needs(name), rank) for name, rank in copies])
        check(self.decided.loads, self.residency)
        for load in self.decided.loads:
            self.residency.note_sent(load.ranks, load.load, load.drop)
        return self.decided.loads

    def answer(self, loads: Iterable[Load]) -> None:
        """The ranks have loaded all of these."""
        for load in loads:
            for rank in load.ranks:
                self.note_loaded(rank, *load.load)

    def note_loaded(self, rank: int, *keys: ModelKey) -> None:
        for key in keys:
            self.residency.note_loaded(rank, LoadedComponent(key, size_of(key)))

    def may_start(self, needs: str | Needs) -> bool:
        wanted = self.needs(needs) if isinstance(needs, str) else needs
        startable = self.decided.startable
        return not self.residency.missing(wanted) and (startable is None or startable.issuperset(wanted))

    def has(self, name: str, *ranks: int) -> bool:
        return all(self.residency.has(keys, ranks or (0,)) for keys in self.needs(name))

    def on(self, rank: int) -> str:
        """The models that are whole on a rank."""
        return "".join(name for name in self.models if self.has(name, rank))


@dataclass
class _Request:
    needs: Needs
    rank: int | None
    head: EngineRequest
    status: Status


@dataclass
class _Requests:
    """What a demand reads of live requests."""

    every: list[_Request]
    version: int = 0

    @property
    def needs(self) -> tuple[Needs, ...]:
        return tuple({request.needs: None for request in self.every})

    @property
    def running(self) -> list[_Request]:
        return [request for request in self.every if request.status is Status.RUNNING]

    def live(self) -> Iterator[_Request]:
        return iter(self.every)


class _Cache:
    """What a demand reads of a cache without jobs."""

    has_devices, models_in_use = True, ()

    def rank_of(self, request: _Request) -> int | None:
        return request.rank

    def waits_for_others(self, request: _Request) -> bool:
        return False

    def jobs(self) -> list[CacheJob]:
        return []

    def wanted_models(self) -> dict[str, float]:
        return {}
