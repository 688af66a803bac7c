"""The op recall: the state that an earlier request has kept, as the latents that steps begin with."""

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


class Recall(Message, OpWork, frozen=True):
    """A kept state -> `latents`. The state is in the API server's memory as long as the request may run, so that each
    run of the node, after whatever death, makes the same latents.
    """

    state: ArrayRef  # float32 [image tokens, latent width]


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_tokens])


def _make(request: Request, node: Node, pages: NodePages) -> Recall:
    state = request.picture.state
    assert state is not None, f"{request.id} has no state to recall"
    return Recall(state)


RECALL = RequestOp(
    name="recall",
    component="vae",
    message=Recall,
    size=_size,
    part="encode",
    outputs=(Port("latents", "latents"),),
    make=_make,
)
