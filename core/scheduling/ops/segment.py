"""The op segment: the mask that words, points or a box ask for, and its active tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.graph.op import OpWork, Port, Sizes
from core.graph.work import Work
from core.graph.workflow import Node
from core.handles import ArrayRef
from core.messages.message import Message
from core.messages.specs import EditSpec, MaskSpec
from core.messages.specs.mask_search import MaskSearch
from core.scheduling.ops.request_op import RequestOp

if TYPE_CHECKING:
    from core.messages.worker import ItemResult
    from core.scheduling.node_cache import NodePages
    from core.scheduling.requests.request import Request


class Segment(Message, OpWork, frozen=True):
    """template -> `mask`, uint8 [height, width], 1 = edit. The same mask and the indices of its active tokens are
    written to shared memory, for steps and for the file that is made. A mask without a pixel fails the item.
    """

    template: ArrayRef
    mask: ArrayRef  # uint8 [height, width]
    active: ArrayRef  # int32 [image tokens], of which the first ones are written: row-major, ascending
    search: MaskSearch
    content_id: str  # identifies the picture
    cache_salt: str = ""  # results are cached, and reused only with the same salt


def _size(sizes: Sizes) -> Work:
    return Work.of([1])  # a segmenter sees every picture at a size of its own


def _make(request: Request, node: Node, pages: NodePages) -> Segment:
    spec = request.head.spec
    assert isinstance(spec, EditSpec | MaskSpec)
    assert spec.search is not None
    return Segment(
        template=spec.template,
        mask=spec.mask,
        active=ArrayRef(spec.active.arena, spec.active.offset, (spec.num_tokens,), spec.active.dtype),
        search=spec.search,
        content_id=spec.content_id,
        cache_salt=spec.cache_salt,
    )


def _note(request: Request, result: ItemResult) -> None:
    request.note_mask(result.active_tokens, result.score)


SEGMENT = RequestOp(
    name="segment",
    component="segmenter",
    message=Segment,
    size=_size,
    part="segment",
    sharing="together",
    outputs=(Port("mask", "mask"),),
    make=_make,
    note=_note,
)
