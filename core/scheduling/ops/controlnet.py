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
    from core.messages.specs.picture_spec import PictureSpec
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
    for each of its rows: the sum of all ControlNets. For a step that none of them steers it says so.
    """

    step: Denoise  # without pages, of which ControlNets have none; they compute the tokens that it computes
    uses: tuple[ControlUse, ...]


def _size(sizes: Sizes) -> Work:
    """A ControlNet computes each row once for every picture that it sees."""
    return Work.of([sizes.num_step_tokens] * sizes.num_rows * sizes.num_controls)


def _make(request: Request, node: Node, pages: NodePages) -> ControlStep:
    step, num_steps = request.progress.scheduled[node.name], request.progress.rounds[node.region]
    work = step_of(request, node, pages, is_masked=request.is_masked(node))
    return ControlStep(work, _uses(request.picture, step, num_steps))


def _uses(spec: PictureSpec, step: int, num_steps: int) -> tuple[ControlUse, ...]:
    """The pictures of all ControlNets that steer a step. One that does not, of a ControlNet of which another does, has
    a scale of 0: what some see depends on all of their pictures."""
    uses = [
        ControlUse(kind.net, kind.mode, number, (control.scale or 0.0) * control.steers(step, num_steps))
        for number, (control, kind) in enumerate(zip(spec.controls, spec.control_types, strict=True))
    ]
    steering = {use.net for use in uses if use.scale}
    return tuple(use for use in uses if use.net in steering)


CONTROLNET = RequestOp(
    name="controlnet",
    component=COMPONENT,
    message=ControlStep,
    size=_size,
    part="denoise",
    sharing="together",
    parallel="sequence",
    inputs=(*DENOISE.inputs[:-1], Port("controls", "control pictures")),
    outputs=(Port("residuals", "residuals"),),
    pages="latents",
    serves_step=True,
    literals=("canvas",),
    make=_make,
)
