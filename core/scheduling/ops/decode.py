"""The op decode: latents to pixels, of a result or a preview."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.graph.op import OpWork, Port, Sizes
from core.graph.work import Work
from core.graph.workflow import Node
from core.handles import ArrayRef, EntryRef
from core.messages.message import Message
from core.scheduling.ops.request_op import RequestOp

if TYPE_CHECKING:
    from core.scheduling.node_cache import NodePages
    from core.scheduling.requests.request import Request


class Decode(Message, OpWork, frozen=True, omit_defaults=True):
    """Latents (`clean` for a partial image, else `latents`) -> `pixels`, and `picture`, uint8 [height, width, 3], if
    nodes read it.
    """

    width: int
    height: int
    # uint8 [height, width, 3] in shared memory, written by the worker; None: the picture goes to other nodes alone.
    pixels: ArrayRef | None
    is_read: bool = False  # by other nodes
    active: ArrayRef | None = None  # int32 indices of the computed tokens; None: all
    template_latents: EntryRef | None = None  # the latents of all other tokens; None: the request has its own
    template: ArrayRef | None = None  # pixels far from every active token are copied from it


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_tokens])


def _make(request: Request, node: Node, pages: NodePages) -> Decode:
    spec = request.picture
    is_part = spec.has_own_pages or pages.latents is not None
    return Decode(
        width=spec.width,
        height=spec.height,
        pixels=_place(request, node),
        is_read=node.name in request.workflow.reader_names,
        active=spec.active if is_part else None,
        template_latents=pages.latents,
        template=spec.template if is_part else None,
    )


def _place(request: Request, node: Node) -> ArrayRef | None:
    """Memory that the caller sees, unless another node makes what the caller gets."""
    if node.shows:
        return request.preview_place(node)
    name = request.workflow.output_names.get(node.name)
    return None if name is None else request.picture.place(name)


DECODE = RequestOp(
    name="decode",
    component="vae",
    message=Decode,
    size=_size,
    part="decode",
    inputs=(Port("latents", "latents"),),
    outputs=(Port("picture", "picture", is_optional=True),),
    pages="latents",
    makes_result=True,
    make=_make,
)
