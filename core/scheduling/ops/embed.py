"""The op embed: one vector of a prompt, by which prompts are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.graph.op import OpWork, Port, Sizes
from core.graph.work import Work
from core.graph.workflow import Node
from core.handles import ArrayRef
from core.messages.message import Message
from core.scheduling.ops.request_op import RequestOp

if TYPE_CHECKING:
    from core.messages.worker import ItemResult
    from core.scheduling.node_cache import NodePages
    from core.scheduling.requests.request import Request

MAX_EMBEDDING = 16384
"""Numbers of an embedding, at most: more than the width of any text encoder's states."""


class Embed(Message, OpWork, frozen=True):
    """`prompt_embeds` of a prompt alone -> `embedding`: the mean over the prompt's own tokens, of
    length 1, in shared memory.

    A mean and no pooled output: not all encoders have one, and of the embedded model's prompts the rank correlation of
    similarity and likeness of pictures was 0.94 with the mean and 0.50 with the pooled output (90 pairs). Padding is
    left out because it is the same in all short prompts, which would all seem alike.
    """

    num_tokens: int  # of the prompt, without padding; 0: another model has encoded it, and all count
    embedding: ArrayRef  # float32 [MAX_EMBEDDING], of which the first ones are written


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_text_tokens])


def _make(request: Request, node: Node, pages: NodePages) -> Embed:
    return Embed(request.text_tokens, request.picture.place("embedding"))


def _note(request: Request, result: ItemResult) -> None:
    request.result_shapes |= result.shapes


EMBED = RequestOp(
    name="embed",
    component="text_encoder",
    message=Embed,
    size=_size,
    part="encode",
    inputs=(Port("prompt_embeds", "text embeddings"),),
    make=_make,
    note=_note,
)
