"""FleetCosts: predicts a request's costs from the cost models that engines report.

The engines of a fleet are identical and learn the same from different batches, so the last report counts for all. With
costs per engine, one that had learnt during a slow moment would get no more work, and so never correct itself. Before
the first report costs are proportional to tokens: enough to compare engines, but not a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from core.costs.cost_model import COPY_FEATURES, FEATURES, features_of
from core.costs.load_report import EngineCosts
from core.graph.op import OPS
from core.graph.workflow import op_of
from core.graph.workflows.inpaint import INPAINT
from core.handles import Tier
from core.scheduling.ops.control_encode import CONTROL_ENCODE
from core.scheduling.ops.controlnet import CONTROLNET
from core.scheduling.ops.prime import PRIME
from core.scheduling.ops.run import RUN
from core.scheduling.ops.segment import SEGMENT
from core.scheduling.ops.template_encode import TEMPLATE_ENCODE

Vector = npt.NDArray[np.float64]

WORKFLOW = INPAINT
"""The plain workflow, whose lines are known. Requests of others say what they have."""

LINES = tuple(
    dict.fromkeys(
        op.cost_name
        for op in (op_of(WORKFLOW.steps[0]), *map(op_of, WORKFLOW.nodes), PRIME, SEGMENT, CONTROL_ENCODE, RUN)
    )
)
"""Names of the cost lines, see Op, in the order of their coefficients in a model's column; the loop's is the first."""

GUESS_PER_KILOTOKEN = 0.02
"""Seconds per 1000 tokens before the first report."""

MAX_SIZES = 64
"""Number of picture sizes with cached costs; most clients send few sizes."""


class Encoding(NamedTuple):
    """A node that runs once, of a workflow that is not the plain one."""

    model: str  # name of the model, or of the user's class
    op: str  # name
    image_tokens: int  # for a user's class: elements of its inputs


class TokensBeside(NamedTuple):
    """Tokens of a request beside those of its image."""

    conditions: int
    text: int
    references: int  # of the conditions
    paged_references: int  # the same, if no step computes them, else 0
    controls: int = 0  # control pictures


Size = tuple[str, int, TokensBeside, tuple[Encoding, ...], int]
"""Model, image tokens, others, nodes that run once, and bytes of a keyframe's pages."""

Features = tuple[float, ...]
"""One value for each of `core.costs.cost_model.FEATURES`."""

_NUM_FEATURES = len(FEATURES)
_STARTS = {line: index * _NUM_FEATURES for index, line in enumerate(LINES)}


@dataclass(frozen=True, slots=True)
class SizeCosts:
    """The costs that do not depend on the mask, in seconds."""

    base: float  # the constant part of a step
    other: float  # encoding prompt and image, and decoding
    prime: float  # priming one keyframe of the template
    template: float  # encoding the template
    load: float  # loading one keyframe from the next slower tier; at most `prime`: engines choose the faster way


def work_features(queries: int, keys: int, constant: float = 1.0) -> Features:
    """Features of a batch of one request; with a constant of 0, those it adds to a batch that runs anyway."""
    cached = keys - queries
    return constant, 1.0, queries / 1e3, queries * keys / 1e6, float(cached > 0), cached / 1e3


class FleetCosts:
    """A column of coefficients per model, shape [lines * features], and one for copies."""

    def __init__(self) -> None:
        self._columns: dict[str, Vector] = {}  # model -> coefficients
        self._joint: dict[str, dict[int, tuple[float, ...]]] = {}  # model -> degree above 1 -> coefficients of steps
        self._controlnets: dict[tuple[str, tuple[str, ...]], tuple[float, ...]] = {}  # (model, names) -> coefficients
        self._sizes: dict[Size, SizeCosts] = {}  # cache, cleared by every report
        self._copies = (0.0,) * len(COPY_FEATURES)  # from the tier below the one that computes

    def is_known(self, model: str) -> bool:
        """Whether any engine has reported costs of this model."""
        return model in self._columns

    def is_joint(self, model: str) -> bool:
        """Whether any engine has reported what steps of this model take that several ranks compute together."""
        return model in self._joint

    def joint_steps(self, model: str, features: Mapping[str, Features]) -> dict[int, float]:
        """Degree above 1 -> seconds of a step on so many ranks. features: of what it adds to a step, by model."""
        _, *added = map(sum, zip(*features.values(), strict=True))
        return {degree: float(np.dot((1.0, *added), line)) for degree, line in self._joint.get(model, {}).items()}

    def step(self, model: str, features: Features) -> float:
        """Seconds that a request with these features adds to a step."""
        return float(np.dot(features, self._column(model)[:_NUM_FEATURES]))

    def beside_step(self, model: str, controlnets: tuple[str, ...], features: Features) -> float:
        """Seconds of a pass of a model's ControlNets with these features; 0 before any engine has seen one."""
        line = self._controlnets.get((model, controlnets))
        return float(np.dot(features, line)) if line else 0.0

    def of_size(self, size: Size) -> SizeCosts:
        """The costs of a size; valid until the next report."""
        costs = self._sizes.get(size)
        if costs is None:
            if len(self._sizes) == MAX_SIZES:
                self._sizes.clear()
            costs = self._sizes[size] = self._costs_of(size)
        return costs

    def observe(self, costs: EngineCosts) -> None:
        """Replace the coefficients by those that an engine has reported."""
        self._columns |= _columns(costs)
        for line in costs.lines:
            if line.op == LINES[0] and line.degree > 1 and not line.controlnets:
                self._joint.setdefault(line.model, {})[line.degree] = line.coefficients
        nets = (line for line in costs.lines if line.op == CONTROLNET.cost_name and line.degree == 1)
        self._controlnets |= {(line.model, line.controlnets): line.coefficients for line in nets}
        copies: dict[Tier, tuple[float, ...]] = {line.source: line.coefficients for line in costs.copies}
        self._copies = copies.get("host") or copies.get("disk") or self._copies
        self._sizes.clear()

    def forget(self, name: str) -> None:
        """Forget the coefficients of a model or a class."""
        self._columns.pop(name, None)
        self._joint.pop(name, None)

    def _costs_of(self, size: Size) -> SizeCosts:
        model, image_tokens, beside, encodings, entry_bytes = size
        weights = _size_weights(image_tokens, beside)
        base, other, prime, template = (weights @ self._column(model)).tolist()
        if encodings:
            other = sum(self._seconds(each, beside) for each in encodings)
        load = float(np.dot((1.0, entry_bytes / 1e6), self._copies))
        return SizeCosts(base, other, prime, template, min(load, prime))

    def _seconds(self, encoding: Encoding, beside: TokensBeside) -> float:
        """Seconds of a node that runs once; 0 if its op has no line."""
        op = OPS[encoding.op]
        start = _STARTS.get(op.cost_name)
        if start is None:
            return 0.0
        features = features_of(op.size(_TokenSizes(encoding.image_tokens, beside)))
        return float(np.dot(features, self._column(encoding.model)[start : start + _NUM_FEATURES]))

    def _column(self, model: str) -> Vector:
        return self._columns.get(model, _GUESS)


@dataclass(frozen=True, slots=True)
class _TokenSizes:
    """The sizes of a request with one row whose steps compute all tokens."""

    num_tokens: int
    beside: TokensBeside
    num_rows: int = 1

    @property
    def num_elements(self) -> int:
        return self.num_tokens

    @property
    def num_controls(self) -> int:
        return self.beside.controls

    @property
    def num_text_tokens(self) -> int:
        return self.beside.text

    @property
    def num_reference_tokens(self) -> int:
        return self.beside.references

    @property
    def num_paged_reference_tokens(self) -> int:
        return self.beside.paged_references

    @property
    def num_all_tokens(self) -> int:
        return self.num_tokens + self.beside.conditions + self.beside.text

    @property
    def num_step_tokens(self) -> int:
        return self.num_all_tokens


@lru_cache(MAX_SIZES)
def _size_weights(image_tokens: int, beside: TokensBeside) -> Vector:
    """The factors of a model's column for the first four fields of SizeCosts, shape [4, lines * features]."""
    sizes = _TokenSizes(image_tokens, beside)
    once = [op_of(node) for node in WORKFLOW.nodes if not node.region and not node.shows]
    weights = np.zeros((4, len(LINES), _NUM_FEATURES))
    weights[0, 0, FEATURES.index("constant")] = 1.0
    for field, ops in zip(weights[1:], (once, [PRIME], [TEMPLATE_ENCODE]), strict=True):
        for op in ops:
            field[LINES.index(op.cost_name)] = features_of(op.size(sizes))
    return weights.reshape(len(weights), -1)


def _columns(costs: EngineCosts) -> dict[str, Vector]:
    """Model -> its column of coefficients."""
    columns: dict[str, Vector] = {}
    for line in costs.lines:
        start = _STARTS.get(line.op)
        if start is not None and line.degree == 1:
            column = columns.setdefault(line.model, np.zeros(len(LINES) * _NUM_FEATURES))
            column[start : start + _NUM_FEATURES] = line.coefficients
    return columns


def _guessed() -> Vector:
    column = np.zeros((len(LINES), _NUM_FEATURES))
    column[[0, LINES.index(PRIME.cost_name)], FEATURES.index("kilotokens")] = GUESS_PER_KILOTOKEN
    return column.reshape(-1)


_GUESS = _guessed()
