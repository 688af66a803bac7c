"""ModelScenario: engines that serve several models in less memory than they take; MODEL_SCENARIOS by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from benchmarks.simulation.machine import IMAGE_TOKENS
from benchmarks.simulation.model_machine import ModelMachine
from benchmarks.simulation.model_set import ModelSet, zipf
from benchmarks.simulation.scenario import REFERENCE, Scenario, make_trace
from core.messages.engine import EngineRequest

SHARED = {"text_encoder": 9_800_000_000, "vae": 170_000_000}
OWN = {"transformer": 23_800_000_000}
"""Bytes of FLUX.1's components in bfloat16."""


@dataclass(frozen=True)
class ModelScenario:
    """num_ranks: of each engine. fits: models of which a rank's budget holds the components; 0: no limit. edits:
    number, arrivals and steps; an engine of theirs is a rank here. failures: share of loads that fail. poison_models:
    names of those whose steps end their rank's process. poison_share: of the requests, whose steps do, too. slo_scale:
    a request is in time that takes at most so many times what it takes alone. num_owners: of requests, each as likely.
    """

    name: str
    models: ModelSet
    num_ranks: int
    fits: int
    edits: Scenario
    load_bytes_per_second: float = 5e9
    failures: float = 0.0
    poison_models: frozenset[str] = frozenset()
    poison_share: float = 0.0
    slo_scale: float = 5.0
    num_owners: int = 8
    num_engines: int = 1

    @property
    def budget(self) -> int:
        """Bytes for the components of a rank; 0: no limit."""
        return self.models.budget(self.fits) if self.fits else 0

    @property
    def machine(self) -> ModelMachine:
        of = self.edits.machine
        return ModelMachine(
            step=of.step,
            token=of.token,
            text_encode=of.text_encode,
            image_encode=of.image_encode,
            decode=of.decode,
            speed=of.speed,
            sizes=self.models.sizes,
            load_bytes_per_second=self.load_bytes_per_second,
        )

    def alone_seconds(self, request: EngineRequest) -> float:
        """What a request takes that has the ranks to itself, its model loaded."""
        machine = self.machine
        once = machine.text_encode + machine.image_encode + machine.decode
        return once / machine.speed + request.rounds[-1] * machine.step_seconds(IMAGE_TOKENS + 512)

    def trace(self, seed: int) -> list[EngineRequest]:
        """The requests in the order they come: exact edits. The same seed draws the same."""
        edits = make_trace(replace(self.edits, num_engines=self.num_engines * self.num_ranks), seed)
        random = np.random.default_rng((seed, 1))
        names, owners = self.models.draw(random, len(edits)), random.integers(self.num_owners, size=len(edits))
        return [
            msgspec.structs.replace(
                edit,
                model=name,
                owner=f"owner {owner}",
                spec=msgspec.structs.replace(edit.spec, is_mask_aware=False),
            )
            for edit, name, owner in zip(edits, names, owners, strict=True)
        ]

    def poisonous(self, seed: int, requests: Sequence[EngineRequest]) -> frozenset[str]:
        """The ids of requests that end their rank's process."""
        drawn = np.random.default_rng((seed, 2)).random(len(requests)) < self.poison_share
        return frozenset(each.request_id for each, is_drawn in zip(requests, drawn, strict=True) if is_drawn)


_EDITS = replace(
    REFERENCE,
    masks="whole",
    max_num_seqs=8,
    load=0.4,
    num_edits=1000,
    machine=replace(REFERENCE.machine, text_encode=0.02, image_encode=0.02, decode=0.04),
)

FIVE = ModelScenario("five", ModelSet.alike(5, zipf(5, 1.0), OWN, SHARED), num_ranks=2, fits=3, edits=_EDITS)

EIGHTY_SEVEN = ModelScenario(
    "eighty-seven",
    ModelSet.alike(87, zipf(87, 0.8), OWN, SHARED),
    num_ranks=16,
    fits=2,
    edits=replace(_EDITS, load=0.25, max_num_seqs=128, num_edits=3000),
)
"""A third of the models fit on the ranks together."""

APART = replace(FIVE, name="apart", models=ModelSet.alike(5, zipf(5, 1.0), SHARED | OWN, {}))
"""Models that share nothing."""

PAIR = ModelScenario(
    "pair", ModelSet.alike(2, (1.0, 1.0), OWN, SHARED), num_ranks=1, fits=1, edits=_EDITS, num_engines=2
)
"""Two models on two engines that have room for one each. With 300 requests at 0.7 of capacity, two seeds: mean latency
6.4 and 9.1 s with 1 and 3 loads, as with each model bound to an engine (6.4 and 8.8 s); while the router counted loads
alone, not what they drop, it was 30 and 45 s with 121 and 115 loads.
"""

SHARDED = replace(
    EIGHTY_SEVEN,
    name="sharded",
    num_ranks=1,
    num_engines=16,
    edits=replace(EIGHTY_SEVEN.edits, max_num_seqs=8),
)
"""EIGHTY_SEVEN by as many engines of one rank, of which each has its own slots."""

FAILING_LOADS = replace(FIVE, name="failing-loads", fits=2, failures=0.1)

POISONOUS_MODEL = replace(FIVE, name="poisonous-model", poison_models=frozenset({"3"}))

POISONOUS_REQUESTS = replace(FIVE, name="poisonous-requests", poison_share=0.01)

_ALL = (FIVE, APART, EIGHTY_SEVEN, PAIR, SHARDED, FAILING_LOADS, POISONOUS_MODEL, POISONOUS_REQUESTS)

MODEL_SCENARIOS = {each.name: each for each in _ALL}
