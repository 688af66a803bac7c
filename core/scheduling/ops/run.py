"""The op run: a user's class, with inputs and outputs that each node declares."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from msgspec import field

from core.graph.op import OpWork, Port, Sizes
from core.graph.work import Work
from core.graph.workflow import Literal, Node
from core.handles import ArrayRef
from core.messages.message import Message
from core.run_class import RUN_CLASS
from core.scheduling.ops.request_op import RequestOp

if TYPE_CHECKING:
    from core.messages.worker import ItemResult
    from core.scheduling.node_cache import NodePages
    from core.scheduling.requests.request import Request


class Run(Message, OpWork, frozen=True, omit_defaults=True):
    """The inputs that other nodes make, that the request gives and that are literals -> what the node declares, each
    under its own name. Results are written to shared memory, too: their bytes, from the start of their place. The
    picture of a request fills its place exactly.
    """

    takes: tuple[Port, ...]
    makes: tuple[Port, ...]
    given: dict[str, ArrayRef] = field(default_factory=dict)  # input -> the request's array
    literals: dict[str, Literal] = field(default_factory=dict)  # input -> its value
    # Result of the workflow -> (output that it is, uint8 [most bytes]; of the picture: uint8 [height, width, 3]).
    results: dict[str, tuple[str, ArrayRef]] = field(default_factory=dict)
    readers: tuple[str, ...] = ()  # of a node that chooses: those that it chooses from


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_elements])


def _make(request: Request, node: Node, pages: NodePages) -> Run:
    spec = request.spec
    given = {name: spec.inputs[source] for name, source in node.given.items() if source in spec.inputs}
    results = {name: (port, spec.place(name)) for name, port in request.workflow.results_of(node).items()}
    if (preview := request.preview_place(node)) is not None:
        results = {"picture": (request.workflow.output_ports["picture"], preview)}
    return Run(
        takes=node.takes,
        makes=node.makes,
        given=given,
        literals=dict(node.literals),
        results=results,
        readers=request.workflow.reader_names[node.name] if node.chooses else (),
    )


def _note(request: Request, result: ItemResult) -> None:
    node = request.workflow.node(result.node)
    request.note_sizes(node, {ref.key.name: prod(ref.shape) for ref in result.tensors})
    request.result_shapes |= result.shapes


RUN = RequestOp(
    name="run",
    component=RUN_CLASS,
    message=Run,
    size=_size,
    part="run",
    has_own_ports=True,
    make=_make,
    note=_note,
)
