"""The op control_encode: a request's control pictures as its ControlNets see them in every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.graph.op import OpWork, Port, Sizes
from core.graph.work import Work
from core.graph.workflow import Node
from core.handles import ArrayRef
from core.messages.message import Message
from core.scheduling.ops.request_op import RequestOp

if TYPE_CHECKING:
    from core.scheduling.node_cache import NodePages
    from core.scheduling.requests.request import Request


class ControlEncode(Message, OpWork, frozen=True):
    """Control pictures -> `controls`, a series of a tensor for each, in their order. Its numbers are the family's own:
    pixels, or latents of the VAE.
    """

    pictures: tuple[ArrayRef, ...]  # uint8 [height, width, 3] each
    seed: int
    is_exact: bool  # as in ImageEncode


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_tokens] * sizes.num_controls)


def _make(request: Request, node: Node, pages: NodePages) -> ControlEncode:
    spec = request.picture
    assert spec.sampling.seed is not None
    pictures = spec.canvas(node.canvas).control_pictures
    return ControlEncode(pictures, spec.sampling.seed, is_exact=not spec.is_mask_aware)


CONTROL_ENCODE = RequestOp(
    name="control_encode",
    component="vae",
    message=ControlEncode,
    size=_size,
    part="encode",
    outputs=(Port("controls", "control pictures"),),
    literals=("canvas",),
    make=_make,
)
