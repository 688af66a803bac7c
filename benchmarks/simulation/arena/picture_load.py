"""PictureLoad: masked edits, pictures of middle size and large ones, some of them under objectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import msgspec
import numpy as np

from benchmarks.simulation.arena.contest import IN_TIME, MEAN, Values
from benchmarks.simulation.arena.degree_machine import DEGREES, LARGE, DegreeMachine
from benchmarks.simulation.machine import IMAGE_TOKENS, TEXT_TOKENS
from benchmarks.simulation.scenario import edit_of
from core.handles import ArrayRef
from core.messages.engine import EngineRequest
from core.messages.specs import EditSpec

STEPS = 28
RATIOS = 0.05, 0.3
"""Bounds of masks, as shares of the picture."""

KINDS = ("masked", "middle", "large")
SIDES = {"middle": (1024, IMAGE_TOKENS), "large": (2048, LARGE)}
"""Kind -> (side in px, image tokens)."""


@dataclass(frozen=True)
class PictureLoad:
    """load: share of what the ranks can do at most: steps at degree 1, masked edits in full batches. shares: of KINDS.
    burstiness: see Scenario. aimed: share of the requests that have an objective, of `scales` times the time alone.
    owners: share of the requests by owner.
    """

    load: float
    num_ranks: int = 4
    number: int = 80
    shares: tuple[float, float, float] = (0.6, 0.28, 0.12)
    burstiness: float = 1.0
    aimed: float = 1 / 3
    scales: tuple[float, float] = (1.5, 4.0)
    num_templates: int = 4
    owners: tuple[float, ...] = (1.0,)
    machine: DegreeMachine = field(default_factory=DegreeMachine)

    def requests(self, seed: int) -> list[EngineRequest]:
        """In the order in which they come; the same seed draws the same."""
        random, number = np.random.default_rng(seed), self.number
        mean = 1 / (self.load * self.capacity)
        arrivals = random.gamma(self.burstiness, mean / self.burstiness, number).cumsum().tolist()
        kinds = random.choice(KINDS, number, p=self.shares).tolist()
        active = np.ceil(random.uniform(*RATIOS, number) * IMAGE_TOKENS).astype(int).tolist()
        templates = random.integers(self.num_templates, size=number).tolist()
        scales = random.uniform(*self.scales, number).tolist()
        are_aimed = (random.random(number) < self.aimed).tolist()
        owners = random.choice(len(self.owners), number, p=self.owners).tolist()
        return [
            self._request(*drawn)
            for drawn in zip(range(number), arrivals, kinds, active, templates, scales, are_aimed, owners, strict=True)
        ]

    def _request(
        self,
        index: int,
        arrival: float,
        kind: str,
        active: int,
        template: int,
        scale: float,
        is_aimed: bool,
        owner: int,
    ) -> EngineRequest:
        edit = edit_of(index, arrival, active, STEPS, template)
        if kind != "masked":
            side, tokens = SIDES[kind]
            whole = ArrayRef(0, 0, (tokens,), "int32")
            changes = {"width": side, "height": side, "num_tokens": tokens, "active": whole, "is_mask_aware": False}
            edit = msgspec.structs.replace(edit, spec=msgspec.structs.replace(edit.spec, **changes))
        objective = arrival + scale * self.alone_seconds(kind, active) if is_aimed else None
        return msgspec.structs.replace(edit, objective=objective, owner=f"owner {owner}")

    def alone_seconds(self, kind: str, active: int) -> float:
        """What a request takes that has all ranks to itself, at its fastest degree."""
        tokens = active if kind == "masked" else SIDES[kind][1]
        degrees = [degree for degree in DEGREES if degree <= self.num_ranks]
        steps = STEPS * min(self.machine.seconds_at(degree, tokens + TEXT_TOKENS) for degree in degrees)
        return steps + self._other_seconds(kind)

    def alone_seconds_of(self, request: EngineRequest) -> float:
        """See `alone_seconds`."""
        spec = request.spec
        assert isinstance(spec, EditSpec), "all requests are edits"
        kind = "masked" if spec.is_mask_aware else _kind_of(spec.num_tokens)
        return self.alone_seconds(kind, spec.active.size)

    def _other_seconds(self, kind: str) -> float:
        machine = self.machine
        share = 1.0 if kind == "masked" else SIDES[kind][1] / IMAGE_TOKENS
        return machine.text_encode + share * (machine.image_encode + machine.decode)

    @property
    def capacity(self) -> float:
        """Requests per second."""
        tokens = {"masked": IMAGE_TOKENS * fmean(RATIOS)} | {kind: tokens for kind, (_, tokens) in SIDES.items()}
        seconds = 0.0
        for kind, share in zip(KINDS, self.shares, strict=True):
            base = self.machine.step / (8 if kind == "masked" else 1)
            step = base + self.machine.token * (tokens[kind] + TEXT_TOKENS)
            seconds += share * (STEPS * step + self._other_seconds(kind))
        return self.num_ranks / seconds


def _kind_of(tokens: int) -> str:
    return next(kind for kind, (_, of_kind) in SIDES.items() if of_kind == tokens)


def in_time_and_mean(requests: Sequence[EngineRequest], latencies: dict[str, float]) -> Values:
    """The share in time of the requests with an objective, and the mean latency of the others, which all end well."""
    aimed = [each for each in requests if each.objective is not None]
    in_time = sum(each.request_id in latencies and _is_in_time(each, latencies) for each in aimed)
    others = [latencies[each.request_id] for each in requests if each.objective is None]
    return {IN_TIME: in_time / max(1, len(aimed)), MEAN: fmean(others) if others else 0.0}


def _is_in_time(request: EngineRequest, latencies: dict[str, float]) -> bool:
    assert request.objective is not None
    return request.arrival + latencies[request.request_id] <= request.objective
