"""Workflows for tests: an op that stands for any other, and random graphs of it."""

from __future__ import annotations

from hypothesis import strategies as st

from core.cache.page_reservations import PageReservations
from core.graph.op import OpWork, Port, Sizes
from core.graph.skipping import readers_of
from core.graph.work import Work
from core.graph.workflow import Edge, Node, Region, Workflow
from core.handles import ArrayRef
from core.messages.message import Message
from core.scheduling.ops.request_op import RequestOp
from core.scheduling.requests.request import Request

NUM_INPUTS = 6


class Toy(Message, OpWork, frozen=True):
    """The message of the op TOY."""

    choices: tuple[str, ...]  # readers to choose from; () for a node that does not choose
    seed: int  # of the request
    pixels: ArrayRef | None  # where the output node writes what it has made

    @property
    def answer(self) -> dict[str, object]:
        """What the result says besides values: the same for the same request."""
        return {"chosen": self.choices[self.seed % len(self.choices)]} if self.choices else {}


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_tokens])


def _make(request: Request, node: Node, pages: PageReservations) -> Toy:
    workflow, seed = request.workflow, request.spec.sampling.seed
    assert seed is not None
    return Toy(
        choices=tuple(sorted(readers_of(workflow, node.name))) if node.chooses else (),
        seed=seed,
        pixels=request.spec.pixels if node.name in workflow.output_names else None,
    )


TOY = RequestOp(
    name="toy",
    component="transformer",
    message=Toy,
    size=_size,
    part="denoise",
    sharing="together",
    inputs=tuple(Port(f"in{index}", "any", is_optional=True) for index in range(NUM_INPUTS)),
    outputs=(Port("x", "any"), Port("y", "any")),
    make=_make,
)


ACCEPTANCE = Workflow(
    "acceptance",
    (
        Node("a", "toy"),
        Node("b", "toy"),
        Node("control", "toy", (Edge("a", "x", "in0", carried="first"), Edge("b", "y", "in1")), region="one"),
        Node(
            "first",
            "toy",
            (Edge("a", "x", "in0", carried="first"), Edge("control", "x", "in1", deferred=True)),
            region="one",
        ),
        Node("check", "toy", (Edge("first", "x", "in0"),), chooses=True),
        Node("left", "toy", (Edge("check", "x", "in0"),)),
        Node("right", "toy", (Edge("check", "x", "in0"), Edge("b", "x", "in1", deferred=True))),
        Node("join", "toy", (Edge("left", "x", "in0"), Edge("right", "x", "in1")), joins=True),
        Node("second", "toy", (Edge("join", "x", "in0", carried="second"), Edge("a", "y", "in1")), region="two"),
        Node("look", "toy", (Edge("second", "y", "in0"),), shows="second"),
        Node("look_at_look", "toy", (Edge("look", "y", "in0"), Edge("a", "x", "in1")), shows="second"),
        Node("end", "toy", (Edge("second", "x", "in0"), Edge("first", "y", "in1"))),
    ),
    {"picture": "end"},
    (Region("one"), Region("two")),
)
"""Two regions, the first of two nodes with a deferred edge between them, a choice, a join, and a side node that another
one reads.
"""


@st.composite
def workflows(draw: st.DrawFn, *, can_choose: bool = True, with_sides: bool = True) -> Workflow:
    """A random graph of toys that `check_workflow` accepts: some nodes, up to two regions of up to three nodes each,
    nodes after them, choices that join again, deferred edges and side nodes.
    """
    nodes: list[Node] = []
    regions: list[Region] = []
    _add_once(draw, nodes, "a", draw(st.integers(1, 2)))
    for name in ("r", "s")[: draw(st.integers(0, 2))]:
        regions.append(Region(name))
        _add_region(draw, nodes, name)
        _add_once(draw, nodes, f"after_{name}", draw(st.integers(0, 2)))
        if with_sides and draw(st.booleans()):
            shown = draw(st.sampled_from([node.name for node in nodes if node.region == name]))
            nodes.append(Node(f"look_{name}", "toy", (Edge(shown, "x", "in0"),), shows=shown))
            if draw(st.booleans()):
                reads = Edge(f"look_{name}", "x", "in0"), Edge(draw(st.sampled_from([shown, "a0"])), "y", "in1")
                nodes.append(Node(f"look_at_look_{name}", "toy", reads, shows=shown))
    if can_choose and draw(st.booleans()):
        _add_choice(nodes)
    sources = [node.name for node in nodes if not node.shows and node.name not in {"check", "left", "right"}]
    nodes.append(Node("end", "toy", tuple(_edges(draw, nodes, sources[-2:])) or (Edge(sources[-1], "x", "in0"),)))
    return Workflow("random", tuple(nodes), {"picture": "end"}, tuple(regions))


def _add_once(draw: st.DrawFn, nodes: list[Node], name: str, count: int) -> None:
    for index in range(count):
        sources = [node.name for node in nodes if not node.shows]
        nodes.append(Node(f"{name}{index}", "toy", tuple(_edges(draw, nodes, sources))))


def _add_region(draw: st.DrawFn, nodes: list[Node], name: str) -> None:
    names = [f"{name}{index}" for index in range(draw(st.integers(1, 3)))]
    outside = [node.name for node in nodes if not node.shows]
    for index, each in enumerate(names):
        by = names[-1] if index == 0 else draw(st.sampled_from(names))
        carried = Edge(draw(st.sampled_from(outside)), "x", "in0", carried=by)
        others = _edges(draw, nodes, outside + names[:index], first=1)
        nodes.append(Node(each, "toy", (carried, *others), region=name))


def _edges(draw: st.DrawFn, nodes: list[Node], sources: list[str], first: int = 0) -> list[Edge]:
    pairs = [(source, name) for source in sources for name in ("x", "y")]
    if not pairs:
        return []
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=NUM_INPUTS - first))
    return [
        Edge(source, name, f"in{first + index}", deferred=draw(st.booleans()))
        for index, (source, name) in enumerate(chosen)
    ]


def _add_choice(nodes: list[Node]) -> None:
    source = next(node.name for node in reversed(nodes) if not node.shows)
    nodes += [
        Node("check", "toy", (Edge(source, "x", "in0"),), chooses=True),
        Node("left", "toy", (Edge("check", "x", "in0"),)),
        Node("right", "toy", (Edge("check", "x", "in0"), Edge(source, "y", "in1"))),
        Node("join", "toy", (Edge("left", "x", "in0"), Edge("right", "y", "in1")), joins=True),
    ]
