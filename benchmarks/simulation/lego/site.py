"""Site: devices that serve the workflows of a setting, and what is known of them: served models, sizes, requests.

Where nodes are scheduled, a served model is a base model with its ControlNets, or with those of one workflow where
nothing is shared, and its requests run the workflows of the engine. Where whole workflows are, each is a served model,
and its requests have a single node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Literal

import msgspec

from benchmarks.simulation.lego.numbers import Numbers, Workflow
from benchmarks.simulation.machine import IMAGE_TOKENS, TEXT_TOKENS
from benchmarks.simulation.scenario import MODEL, PIXELS, SIDE
from core.control import Control
from core.control_type import ControlType
from core.costs.cost_model import CostKey, CostModel
from core.costs.latency_table import LatencyTable
from core.costs.profile import Profile
from core.graph import workflow as graph
from core.graph.catalog import CONTROLLED
from core.graph.op import OPS, OpWork, Sizes
from core.graph.work import Work
from core.graph.workflows.inpaint import INPAINT
from core.handles import Artefact, ModelKey
from core.messages.engine import EngineRequest
from core.messages.message import Message
from core.messages.specs import GenerationSpec
from core.model_info import ModelInfo
from core.sampling_params import SamplingParams
from core.scheduling.node_cache import NodePages
from core.scheduling.ops.request_op import RequestOp
from core.scheduling.requests.request import Request

Unit = Literal["node", "node, unshared", "workflow", "workflow, shared"]
"""What is scheduled: nodes or whole workflows. Workflows share components of equal names where nodes are scheduled, if
not "unshared", and where whole ones are, if "shared".
"""

PIPELINE = "pipeline"
"""Op, kind of component and name of the workflow of requests that run as a whole."""

ROWS = (1, 2, 4, 8)
"""Requests of batches that are profiled."""

STEP_TOKENS = IMAGE_TOKENS + TEXT_TOKENS


class Pipeline(Message, OpWork, frozen=True):
    """Stands for a whole request; nothing is computed."""


@dataclass(frozen=True)
class Site:
    """slo_scale: a request is in time that takes at most so many times what its workflow takes alone; inf: requests
    have no objective. most_nets: ControlNets of the workflows that are served, at most.
    """

    numbers: Numbers
    setting: str
    num_ranks: int
    slo_scale: float = 2.0
    most_nets: int = 2

    @cached_property
    def workflows(self) -> list[Workflow]:
        return [each for each in self.numbers.workflows(self.setting) if each.num_nets <= self.most_nets]

    @property
    def budget(self) -> int:
        """Bytes for weights of each device."""
        return _bytes(self.numbers.device_gigabytes)

    def mean_seconds(self, shares: Sequence[float]) -> float:
        """Of a request alone. shares: of the workflows."""
        alone = map(self.numbers.alone_seconds, self.workflows)
        return sum(share * seconds for share, seconds in zip(shares, alone, strict=True))

    # ------------------------------------------------------------------------------------------------- models

    def infos(self, unit: Unit) -> dict[str, ModelInfo]:
        """Served models by name."""
        if has_nodes(unit):
            most = {self.model(each, unit): each for each in self.workflows}  # a base's last one has most ControlNets
            return {name: self._info(name, workflow, unit) for name, workflow in most.items()}
        return {
            each.name: msgspec.structs.replace(
                MODEL, name=each.name, page_scheme=None, components=self.keys(each, unit)
            )
            for each in self.workflows
        }

    def model(self, workflow: Workflow, unit: Unit) -> str:
        """The name of the served model that makes a workflow's pictures."""
        return workflow.base if unit == "node" else workflow.name

    def _info(self, name: str, workflow: Workflow, unit: Unit) -> ModelInfo:
        keys = self.keys(workflow, unit)
        nets = dict(zip(workflow.nets, (key for key in keys if key.component == "controlnet"), strict=True))
        return msgspec.structs.replace(
            MODEL,
            name=name,
            family=self.numbers.families[workflow.base],
            page_scheme=None,
            components=tuple(key for key in keys if key.component != "controlnet"),
            controlnets=nets,
            controls={name: ControlType(name) for name in nets},
        )

    def keys(self, workflow: Workflow, unit: Unit) -> tuple[ModelKey, ...]:
        """The components of a workflow."""
        names = self.numbers.components(workflow)
        if unit == "workflow":
            return (ModelKey(workflow.name, PIPELINE),)
        if unit == "workflow, shared":
            return tuple(ModelKey(name, PIPELINE) for name in names)
        owner = f"{workflow.name}: " if unit == "node, unshared" else ""
        return tuple(ModelKey(owner + name, _kind(name, workflow.base)) for name in names)

    def sizes(self, unit: Unit) -> dict[ModelKey, int]:
        """Bytes of each component."""
        found: dict[ModelKey, int] = {}
        for each in self.workflows:
            sizes, keys = self.numbers.components(each), self.keys(each, unit)
            gigabytes = [sum(sizes.values())] if unit == "workflow" else list(sizes.values())
            found |= {key: _bytes(size) for key, size in zip(keys, gigabytes, strict=True)}
        return found

    def started(self, unit: Unit, rank: int) -> tuple[ModelKey, ...]:
        """What a device has at first: all that fits, each device beginning with another base model or workflow."""
        sizes, found, left = self.sizes(unit), dict[ModelKey, None](), self.budget
        for keys in self._in_order(unit, rank):
            needed = [key for key in keys if key not in found]
            if sum(sizes[key] for key in needed) <= left:
                found |= dict.fromkeys(needed)
                left -= sum(sizes[key] for key in needed)
        return tuple(found)

    def has_room(self, unit: Unit, keys: Sequence[ModelKey]) -> bool:
        """Whether a device can have all of these at once."""
        sizes = self.sizes(unit)
        return sum(sizes[key] for key in keys) <= self.budget

    def _in_order(self, unit: Unit, rank: int) -> Iterator[tuple[ModelKey, ...]]:
        bases = list(dict.fromkeys(each.base for each in self.workflows))
        of_base = {base: [each for each in self.workflows if each.base == base] for base in bases}
        first = rank % len(bases)
        every = [each for base in (*bases[first:], *bases[:first]) for each in of_base[base]]
        if unit == "workflow":
            first = rank % len(self.workflows)
            every = [*self.workflows[first:], *self.workflows[:first]]
        for each in every:
            yield self.keys(each, unit)

    # ------------------------------------------------------------------------------------------------- requests

    def request(self, index: int, seconds: float, workflow: Workflow, unit: Unit) -> EngineRequest:
        """A picture to make of a prompt."""
        rounds, controls = self.numbers.rounds(workflow.base), workflow.nets if has_nodes(unit) else ()
        spec = GenerationSpec(
            prompt="",
            sampling=SamplingParams(num_inference_steps=rounds, guidance_scale=3.5, seed=0),
            width=SIDE,
            height=SIDE,
            num_tokens=IMAGE_TOKENS,
            max_text_tokens=TEXT_TOKENS,
            content_id="",
            outputs={"picture": Artefact(PIXELS)},
            controls=tuple(Control(type=name, scale=1.0) for name in controls),
            control_types=tuple(map(ControlType, controls)),
            control_pictures=(PIXELS,) * len(controls),
        )
        of_nodes = CONTROLLED[INPAINT] if controls else INPAINT
        return EngineRequest(
            request_id=str(index),
            model=self.model(workflow, unit),
            arrival=seconds,
            objective=seconds + self.slo_scale * self.numbers.alone_seconds(workflow) if self.slo_scale < inf else None,
            workflow=of_nodes.name if has_nodes(unit) else PIPELINE,
            rounds=(rounds,) if has_nodes(unit) else (),
            spec=spec,
        )

    # ------------------------------------------------------------------------------------------------- forecast

    def teach(self, cost: CostModel, unit: Unit) -> None:
        """Give a cost model the profile of all work, and of loads."""
        teach(cost, self._profiles(unit))
        for gigabytes in (1, 10, 30):
            cost.observe_load(_bytes(gigabytes), gigabytes / self.numbers.load_gigabytes_per_second)

    def _profiles(self, unit: Unit) -> Mapping[CostKey, list[tuple[Work, float]]]:
        found: dict[CostKey, list[tuple[Work, float]]] = {}
        for each in self.workflows:
            info = self.infos(unit)[self.model(each, unit)]
            for op, keys, rows, tokens in self._ops(each, unit):
                for degree in (1, 2) if OPS[op].parallel != "none" else (1,):
                    key = CostKey(info.family, keys, op, info.device, degree)
                    found[key] = [
                        (Work.of([tokens] * number * rows), op_seconds(self.numbers, op, each, number, degree))
                        for number in ROWS
                    ]
        return found

    def _ops(self, workflow: Workflow, unit: Unit) -> Iterator[tuple[str, tuple[ModelKey, ...], int, int]]:
        """(op, components, rows and their tokens of one request)"""
        if not has_nodes(unit):
            yield PIPELINE, self.keys(workflow, unit), 1, IMAGE_TOKENS
            return
        by_kind: dict[str, list[ModelKey]] = {}
        for key in self.keys(workflow, unit):
            by_kind.setdefault(key.component, []).append(key)
        yield "text_encode", tuple(by_kind["text_encoder"]), 1, TEXT_TOKENS
        yield "image_encode", tuple(by_kind["vae"]), 1, IMAGE_TOKENS
        yield "decode", tuple(by_kind["vae"]), 1, IMAGE_TOKENS
        yield "denoise", tuple(by_kind["transformer"]), 1, STEP_TOKENS
        if workflow.num_nets:
            yield "control_encode", tuple(by_kind["vae"]), workflow.num_nets, IMAGE_TOKENS
            yield "controlnet", tuple(by_kind["controlnet"]), workflow.num_nets, STEP_TOKENS


def teach(cost: CostModel, profiles: Mapping[CostKey, Sequence[tuple[Work, float]]]) -> None:
    """Give a cost model profiles: work of batches, whose rows are alike, and the seconds that they take."""
    for key, every in profiles.items():
        for work, seconds in every:
            cost.observe(key, work, seconds)
        table = LatencyTable((len(work.queries), work.queries[0], seconds) for work, seconds in every)
        cost.add_profile(key, Profile(table))


def has_nodes(unit: Unit) -> bool:
    """Whether nodes are scheduled, not whole workflows."""
    return unit in ("node", "node, unshared")


def op_seconds(numbers: Numbers, op: str, workflow: Workflow, number: int, degree: int) -> float:
    """What a batch of this number of requests of a workflow takes on so many devices, but for jitter."""
    match op:
        case "pipeline":
            return number * numbers.alone_seconds(workflow)
        case "text_encode":
            return numbers.encoding_seconds(number)
        case "decode":
            return numbers.decode_seconds * number + numbers.node_seconds
        case "denoise":
            return numbers.round_seconds(workflow.base, number, degree)
        case "controlnet":
            return numbers.control_seconds(workflow.base, workflow.num_nets, number, degree)
    return numbers.node_seconds * number  # encodings of noise and control pictures, which the paper does not have


def register() -> graph.Workflow:
    """The op of whole requests, in this process, and their workflow."""
    if PIPELINE not in OPS:
        OPS.register(
            RequestOp(name=PIPELINE, component=PIPELINE, message=Pipeline, size=_size, part="decode", make=_make)
        )
    return graph.Workflow(PIPELINE, (graph.Node(PIPELINE, PIPELINE),), {"picture": PIPELINE})


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_tokens])


def _make(request: Request, node: graph.Node, pages: NodePages) -> Pipeline:
    return Pipeline()


def _kind(name: str, base: str) -> str:
    """The kind of a component by its name."""
    if name.startswith(("text_encoder", "vae")):
        return name.partition(" ")[0]
    return "transformer" if name == base else "controlnet"


def _bytes(gigabytes: float) -> int:
    return round(gigabytes * 1e9)
