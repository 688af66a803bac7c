"""The op upscale: one pass's latents at the size of the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from core.graph.op import OpWork, Port, Sizes
from core.graph.work import Work
from core.graph.workflow import Node
from core.interpolation import Interpolation
from core.messages.message import Message
from core.scheduling.ops.request_op import RequestOp

if TYPE_CHECKING:
    from core.scheduling.node_cache import NodePages
    from core.scheduling.requests.request import Request


class Upscale(Message, OpWork, frozen=True):
    """`latents` of one pass -> `latents` of a picture of another size, for the next one. Sizes are pixels."""

    width: int
    height: int
    to_width: int
    to_height: int
    method: Interpolation = "bilinear"


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_tokens])


def _make(request: Request, node: Node, pages: NodePages) -> Upscale:
    (edge,) = node.inputs
    made, wanted = (request.spec.canvas(each.canvas) for each in (request.workflow.node(edge.source), node))
    sizes = {"width": made.width, "height": made.height, "to_width": wanted.width, "to_height": wanted.height}
    return Upscale(**sizes, method=msgspec.convert(node.literals.get("method", "bilinear"), Interpolation))


UPSCALE = RequestOp(
    name="upscale",
    component="vae",
    message=Upscale,
    size=_size,
    part="encode",
    inputs=(Port("latents", "latents"),),
    outputs=(Port("latents", "latents"),),
    literals=("canvas", "method"),
    make=_make,
)
