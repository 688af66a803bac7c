"""The op text_encode: the prompt's embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.graph.op import OpWork, Port, Sizes
from core.graph.work import Work
from core.graph.workflow import Node
from core.handles import ArrayRef
from core.messages.message import Message
from core.patches import PatchSet
from core.scheduling.ops.request_op import RequestOp

if TYPE_CHECKING:
    from core.messages.worker import ItemResult
    from core.scheduling.node_cache import NodePages
    from core.scheduling.requests.request import Request


class TextEncode(Message, OpWork, frozen=True, omit_defaults=True):
    """prompt -> `prompt_embeds` [text tokens of all rows, width], `text_lengths` int64 [rows] and
    `pooled_prompt_embeds` [rows, width] under this item's node: a row for the prompt, and one for the negative prompt
    if there is one.
    """

    prompt: str
    max_sequence_length: int
    negative_prompt: str | None = None
    # The picture, for encoders that see it; an empty canvas of this size in px if there is none.
    template: ArrayRef | None = None
    width: int = 0
    height: int = 0
    references: tuple[ArrayRef, ...] = ()  # further pictures that such encoders see
    content_id: str = ""  # identifies the pictures
    cache_salt: str = ""  # embeddings are cached, and reused only with the same salt
    patches: PatchSet = ()


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_text_tokens] * sizes.num_rows)


def _make(request: Request, node: Node, pages: NodePages) -> TextEncode:
    spec = request.picture
    return TextEncode(
        prompt=spec.prompt,
        max_sequence_length=spec.max_text_tokens,
        negative_prompt=spec.sampling.negative_prompt,
        template=spec.template,
        width=spec.width,
        height=spec.height,
        references=spec.references,
        content_id=spec.content_id,
        cache_salt=spec.cache_salt,
        patches=request.patches_of(node),
    )


def _note(request: Request, result: ItemResult) -> None:
    if request.model_of(request.workflow.node(result.node)) == request.head.model:  # another's may count otherwise
        request.text_tokens, request.prompt_truncated = result.text_tokens, result.prompt_truncated


TEXT_ENCODE = RequestOp(
    name="text_encode",
    component="text_encoder",
    message=TextEncode,
    size=_size,
    part="encode",
    outputs=(
        Port("prompt_embeds", "text embeddings"),
        Port("text_lengths", "text lengths"),
        Port("pooled_prompt_embeds", "pooled text embeddings"),
    ),
    make=_make,
    note=_note,
)
