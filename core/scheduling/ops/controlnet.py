"""The op controlnet: what a request's ControlNets add to the blocks of its next denoising step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from core.graph.op import OpWork, Port, Sizes
from core.graph.work import Work
from core.graph.workflow import Node
from core.messages.message import Message
from core.scheduling.ops.denoise import DENOISE, Denoise, step_of
from core.scheduling.ops.request_op import RequestOp
from core.scheduling.requests.bindings import CONTROLNET as COMPONENT

if TYPE_CHECKING:
    from core.scheduling.node_cache import NodePages
    from core.scheduling.requests.request import Request


class ControlUse(msgspec.Struct, frozen=True):
    """How one control picture steers a step."""

    net: str  # name of the ControlNet
    mode: int | None  # see ControlType
    picture: int  # its number among the request's control pictures
    scale: float  # factor on what is added


class ControlStep(Message, OpWork, frozen=True):
    """The inputs of a step, and `controls` of `control_encode` -> `residuals`, a series of what the step's blocks add
    for each of its rows: the sum of all ControlNets. Nothing is made for a step that none of them steers.
    """

    step: Denoise  # without pages, of which ControlNets have none; they compute the tokens that it computes
    uses: tuple[ControlUse, ...]


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_step_tokens] * sizes.num_rows)


def _make(request: Request, node: Node, pages: NodePages) -> ControlStep:
    spec, is_masked = request.picture, request.is_masked(node)
    step, num_steps = request.progress.scheduled[node.name], request.progress.rounds[node.region]
    uses = tuple(
        ControlUse(kind.net, kind.mode, number, control.scale)
        for number, (control, kind) in enumerate(zip(spec.controls, spec.control_types, strict=True))
        if control.scale and control.steers(step, num_steps)
    )
    return ControlStep(step=step_of(request, node, pages, is_masked=is_masked), uses=uses)


CONTROLNET = RequestOp(
    name="controlnet",
    component=COMPONENT,
    message=ControlStep,
    size=_size,
    part="denoise",
    sharing="together",
    inputs=(*DENOISE.inputs[:-1], Port("controls", "control pictures")),
    outputs=(Port("residuals", "residuals", is_optional=True),),
    pages="latents",
    serves_step=True,
    literals=("canvas",),
    make=_make,
)
