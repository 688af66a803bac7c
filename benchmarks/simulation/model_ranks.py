"""ModelRanks: simulated ranks with a memory for components, loads that may fail, and deaths by what is poisonous."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from benchmarks.simulation.engine import Ranks
from benchmarks.simulation.rank_memory import RankMemory
from core.failure import Failure
from core.graph.op import OPS
from core.handles import LoadedComponent, ModelKey
from core.messages.worker import Batch, Item, Load, ModelFailed, ModelLoaded, StepPlan
from core.model_info import ModelInfo
from core.scheduling.model_loads import LoadAnswer
from core.scheduling.ops.controlnet import ControlStep
from core.scheduling.requests.bindings import Bindings

UNREADABLE = Failure("config", "a simulated file cannot be read")


@dataclass(frozen=True)
class Poison:
    """A rank dies of a batch that makes a step of one of these requests, or of any request to one of these models."""

    models: frozenset[str] = frozenset()
    requests: frozenset[str] = frozenset()

    def is_in(self, batch: Batch) -> bool:
        """Whether a rank dies of this batch."""
        if OPS[batch.op].part != "denoise":
            return False
        return any(item.request_id in self.requests or item.model in self.models for item in batch.items)


class ModelRanks(Ranks):
    """All ranks of an engine. They check that they have what their batches need. A process starts with the components
    of the first model.
    """

    def __init__(
        self,
        num_ranks: int,
        models: Mapping[str, ModelInfo],
        sizes: Mapping[ModelKey, int],
        budget: int,
        poison: Poison,
        failure_share: float,
        random: Random,
    ) -> None:
        """failure_share: of the loads that fail, 0..1, drawn from `random` when they end."""
        self.memory = RankMemory(num_ranks, sizes, budget)
        self.loaded: list[LoadedComponent] = []  # so far, on any rank, without those of the processes' starts
        self.num_failed_loads = 0
        self.num_deaths = 0
        self._bindings = Bindings(models)
        self._first = next(iter(models.values())).components
        self._poison, self._failure_share, self._random = poison, failure_share, random

    def begin(self, part: StepPlan, rank: int) -> None:
        dropped = {key for load in part.loads for key in load.drop}
        for batch in part.batches:
            for item in batch.items:
                self.memory.check_has(rank, self._keys_of(item, batch.op), dropped)

    def _keys_of(self, item: Item, op: str) -> tuple[ModelKey, ...]:
        """What an item computes with."""
        if isinstance(item.work, ControlStep):
            names = tuple(sorted({use.net for use in item.work.uses}))
            return self._bindings.controlnets(item.model, names).keys
        return self._bindings.keys(item.model, *OPS[op].components).keys

    def dies(self, batch: Batch) -> bool:
        is_deadly = self._poison.is_in(batch)
        if is_deadly:
            self.num_deaths += 1
            self.memory.lose(batch.ranks[0])
        return is_deadly

    def has(self, key: ModelKey, rank: int) -> bool:
        return self.memory.has(rank, (key,))

    def begin_load(self, load: Load, rank: int) -> None:
        self.memory.begin(rank, load)

    def end_load(self, key: ModelKey, rank: int, seconds: float) -> LoadAnswer:
        if self.has(key, rank):
            return ModelLoaded(rank, self.memory.loaded(key), seconds)
        is_loaded = self._random.random() >= self._failure_share
        self.memory.end(rank, key, is_loaded=is_loaded)
        if not is_loaded:
            self.num_failed_loads += 1
            return ModelFailed(rank, key, UNREADABLE)
        self.loaded.append(self.memory.loaded(key))
        return ModelLoaded(rank, self.loaded[-1], seconds)

    def start(self, rank: int) -> tuple[LoadedComponent, ...]:
        return self.memory.start(rank, self._first)
