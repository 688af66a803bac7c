"""Graphs that nobody should register: sound ones with mistakes in them, tangles of choices, and noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random

from workflows import Toy

from core.errors import WorkflowError
from core.graph.op import OPS, Op, Port, Sizes
from core.graph.work import Work
from core.graph.workflow import Edge, Node, Region, Workflow

MOST_NODES = 200
MOST_INPUTS = 64


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_tokens])


WIDE = Op(
    name="wide",
    component="transformer",
    message=Toy,
    size=_size,
    part="denoise",
    sharing="together",
    inputs=tuple(Port(f"in{index}", "any", is_optional=True) for index in range(MOST_INPUTS)),
    outputs=(Port("x", "any"), Port("y", "any"), Port("other", "other"), Port("rare", "any", is_optional=True)),
)
"""An op that takes anything."""

STRICT = Op(
    name="strict",
    component="vae",
    message=Toy,
    size=_size,
    part="decode",
    inputs=(Port("in0", "any"), Port("in1", "other", is_optional=True)),
    outputs=(Port("x", "any"),),
    pages="span",
)
"""An op that needs an input, and whose runs may be repeated."""


@contextmanager
def hostile_ops() -> Iterator[None]:
    """While the ops of hostile graphs are registered."""
    for op in (WIDE, STRICT):
        OPS.register(op)
    try:
        yield
    finally:
        for op in (WIDE, STRICT):
            OPS.unregister(op.name)


def _workflow(nodes: Sequence[Node], output: str, regions: Sequence[Region] = ()) -> Workflow:
    return Workflow("hostile", tuple(nodes), {"picture": output}, tuple(regions))


# ---------------------------------------------------------------------------------------------------- sound graphs


class _SoundGraph:
    """Grows a graph that has to be accepted: nodes, regions, side nodes, and choices within choices."""

    def __init__(self, random: Random, num_nodes: int, width: int) -> None:
        self.nodes: list[Node] = []
        self.regions: list[Region] = []
        self._random, self._left, self._width = random, num_nodes, width

    def workflow(self) -> Workflow:
        readable = self.grow([], depth=0)
        while self._left > 1:
            readable += self.grow(readable, depth=0)
        self.nodes.append(Node("end", "wide", self._edges(readable[-3:])))
        return _workflow(self.nodes, "end", self.regions)

    def grow(self, readable: Sequence[str], depth: int) -> list[str]:
        """Add a few nodes that run whenever these nodes do; returns those that others may read."""
        kind = self._random.choice(("once", "region", "choice")) if readable and self._left > 5 else "once"
        if kind == "region":
            return self._grow_region(readable)
        if kind == "choice" and depth < 3:
            return self._grow_choice(readable, depth)
        return [self._add(self._edges(readable))]

    def _grow_region(self, readable: Sequence[str]) -> list[str]:
        region = Region(f"loop{len(self.regions)}")
        self.regions.append(region)
        names = [self._next_name(ahead) for ahead in range(self._random.randint(1, 3))]
        carried = Edge(self._random.choice(readable), "x", "in0", carried=names[-1])
        fixed = self._edges(readable, first=1)
        for before, name in zip(["", *names], names, strict=False):
            inside = (Edge(before, "x", "in1", deferred=self._random.random() < 0.5),) if before else ()
            self._add((carried, *(inside or fixed)), region=region.name)
            assert name == self.nodes[-1].name
        if self._random.random() < 0.5:
            shown = self._random.choice(names)
            look = self._add((Edge(shown, "x", "in0"),), shows=shown)
            if self._random.random() < 0.5:
                self._add((Edge(look, "x", "in0"), Edge(self._random.choice(readable), "y", "in1")), shows=shown)
        return names

    def _grow_choice(self, readable: Sequence[str], depth: int) -> list[str]:
        check = self._add(self._edges(readable), chooses=True)
        ends = [self._grow_branch(check, readable, depth) for _ in range(self._random.randint(2, 4))]
        if self._random.random() < 0.5:
            return [self._add(self._edges_of(ends), joins=True)]
        join = ends[0]
        for end in ends[1:]:
            join = self._add(self._edges_of([join, end]), joins=True)
        return [join]

    def _grow_branch(self, check: str, readable: Sequence[str], depth: int) -> str:
        branch = [self._add((Edge(check, "x", "in0"), *self._edges(readable, first=1)))]
        for _ in range(self._random.randint(0, 2)):
            branch += self.grow(branch, depth + 1)
        return branch[-1]

    def _edges(self, sources: Sequence[str], first: int = 0) -> tuple[Edge, ...]:
        most = min(self._width, len(sources) * 2)
        number = self._random.randint(min(1, most), most)
        return tuple(
            Edge(self._random.choice(sources), self._random.choice("xy"), f"in{first + index}", deferred=index % 3 == 2)
            for index in range(min(number, MOST_INPUTS - first))
        )

    def _edges_of(self, sources: Sequence[str]) -> tuple[Edge, ...]:
        return tuple(Edge(source, "x", f"in{index}") for index, source in enumerate(sources))

    def _add(self, inputs: tuple[Edge, ...], **fields: object) -> str:
        self._left -= 1
        self.nodes.append(Node(self._next_name(), "wide", inputs, **fields))  # type: ignore[arg-type]
        return self.nodes[-1].name

    def _next_name(self, ahead: int = 0) -> str:
        return f"n{len(self.nodes) + ahead}"


def sound_graph(random: Random) -> Workflow:
    """A graph that can run."""
    num_nodes = random.choice((8, 8, 20, 20, 40, 180))
    return _SoundGraph(random, num_nodes, random.choice((1, 2, 3, 6))).workflow()


# ---------------------------------------------------------------------------------------------------- mistakes


def _other_name(random: Random, nodes: Sequence[Node], before: int) -> str:
    """The name of another node, most often of one that is listed before."""
    if random.random() < 0.8:
        return nodes[random.randrange(max(1, before))].name
    return random.choice((random.choice(nodes).name, "missing", "", "n" * 10_000))


def _changed_node(random: Random, nodes: list[Node]) -> None:
    """Change one field of one node."""
    index = random.randrange(len(nodes))
    name = _other_name(random, nodes, index)
    changes = (
        {"op": random.choice(("strict", "missing", ""))},
        {"name": name if random.random() < 0.2 else nodes[index].name},
        {"role": random.choice(("transformer", "vae", "missing"))},
        {"region": random.choice(("loop0", "loop1", "loop2", "missing"))},
        {"shows": name},
        {"chooses": not nodes[index].chooses},
        {"joins": not nodes[index].joins},
        {"inputs": ()},
        {"inputs": (*nodes[index].inputs, *nodes[index].inputs[:1])},
        {"inputs": tuple(replace(edge, deferred=True) for edge in nodes[index].inputs)},
        {"inputs": (*nodes[index].inputs, Edge(nodes[index].name, "x", "in63"))},
    )
    nodes[index] = replace(nodes[index], **random.choice(changes))  # type: ignore[arg-type]


def _changed_edge(random: Random, nodes: list[Node]) -> None:
    """Change one field of one edge, or add an edge."""
    index = random.randrange(len(nodes))
    name, inputs = _other_name(random, nodes, index), list(nodes[index].inputs)
    if not inputs or random.random() < 0.4:
        inputs.append(Edge(name, "x", f"in{random.randrange(MOST_INPUTS)}"))
    place = random.randrange(len(inputs))
    changes: tuple[dict[str, object], ...] = (
        {},
        {"source": name},
        {"name": random.choice(("y", "other", "rare", "missing", ""))},
        {"port": random.choice(("in0", "in1", "in64", "", "missing"))},
        {"carried": name},
        {"deferred": not inputs[place].deferred},
    )
    inputs[place] = replace(inputs[place], **random.choice(changes))  # type: ignore[arg-type]
    nodes[index] = replace(nodes[index], inputs=tuple(inputs))


def _changed_list(random: Random, nodes: list[Node]) -> None:
    """Leave out a node, list it twice, or list it elsewhere."""
    node = nodes.pop(random.randrange(len(nodes)))
    for _ in range(random.choice((0, 1, 1, 2))):
        nodes.insert(random.randint(0, len(nodes)), node)


def _read_across(random: Random, nodes: list[Node]) -> None:
    """Let a node read one that is listed before, whatever region or branch this is in."""
    index = random.randrange(len(nodes))
    free = MOST_INPUTS - 1 - sum(edge.input.endswith(("61", "62", "63")) for edge in nodes[index].inputs)
    edge = Edge(_other_name(random, nodes, index), "x", f"in{free}")
    nodes[index] = replace(nodes[index], inputs=(*nodes[index].inputs, edge))


_MISTAKES: tuple[Callable[[Random, list[Node]], None], ...] = (
    _changed_node,
    _changed_edge,
    _changed_list,
    _read_across,
    _read_across,
)


def graph_with_mistakes(random: Random) -> Workflow:
    """A graph that could run but for a few random changes. Raises WorkflowError if two nodes or regions have one
    name.
    """
    workflow = sound_graph(random)
    nodes, regions, output = list(workflow.nodes), list(workflow.regions), workflow.outputs["picture"]
    for _ in range(random.randint(1, 3)):
        random.choice(_MISTAKES)(random, nodes)
    if random.random() < 0.1:
        output = _other_name(random, nodes, len(nodes))
    if random.random() < 0.1:
        regions.append(Region(random.choice(("", "loop0", "empty"))))
    return _workflow(nodes, output, regions)


# ---------------------------------------------------------------------------------------------------- tangles, noise


def tangle(random: Random, num_nodes: int, width: int, num_choosers: int, num_regions: int = 0) -> Workflow:
    """A graph in order, whose choices, joins, regions and side nodes meet anyhow."""
    nodes: list[Node] = []
    for index in range(num_nodes):
        sources = random.sample(nodes, min(len(nodes), random.randint(0 if index < 3 else 1, width)))
        inputs = tuple(Edge(source.name, "x", f"in{port}") for port, source in enumerate(sources))
        nodes.append(Node(f"n{index}", "wide", inputs, joins=random.random() < 0.5))
    output = random.choice(nodes[num_nodes // 2 :]).name
    regions = [Region(f"loop{index}") for index in range(num_regions if num_nodes > 3 else 0)]
    for region in regions:
        _add_region(random, nodes, region.name)
    _add_choosers(random, nodes, num_choosers)
    return _workflow(nodes, output, regions)


def _add_region(random: Random, nodes: list[Node], region: str) -> None:
    """Let some nodes repeat, and perhaps another one show one of them."""
    first = random.randrange(1, len(nodes) - 2)
    number = random.randint(1, 3)
    if any(node.region or node.shows for node in nodes[first : first + number]):
        return
    repeating = range(first, min(len(nodes), first + number))
    by = nodes[random.choice(repeating)].name
    for index in repeating:
        carried = Edge(nodes[random.randrange(first)].name, "y", "in63", carried=by)
        nodes[index] = replace(nodes[index], inputs=(*nodes[index].inputs, carried), region=region)
    if random.random() < 0.5:
        other = random.choice([node for node in nodes if not node.shows])
        inputs = Edge(by, "x", "in0"), Edge(other.name, "x", "in1")
        nodes.append(Node(f"look_{region}", "wide", inputs[: random.randint(1, 2)], shows=by))


def _add_choosers(random: Random, nodes: list[Node], number: int) -> None:
    readers = Counter(edge.source for node in nodes for edge in node.inputs)
    several = [i for i, node in enumerate(nodes) if readers[node.name] > 1 and not node.region and not node.shows]
    for place in random.sample(several, min(len(several), number)):
        nodes[place] = replace(nodes[place], chooses=True)


def noise(random: Random) -> Workflow:
    """Nodes, edges and regions of which nothing need fit."""
    num_nodes = random.choice((0, 1, 5, 10, 30, MOST_NODES))
    names = [f"n{index}" for index in range(num_nodes)] or ["n0"]
    regions = [Region(f"loop{index}") for index in range(random.choice((0, 1, 3, num_nodes // 2)))]
    places = ["", "", *(region.name for region in regions)]
    nodes = [
        Node(
            name,
            random.choice(("wide", "wide", "wide", "strict")),
            tuple(
                Edge(
                    random.choice(names[: max(1, index)] if random.random() < 0.99 else names),
                    "x",
                    f"in{port}",
                    carried=random.choice(names) if random.random() < 0.05 else "",
                    deferred=random.random() < 0.1,
                )
                for port in range(random.choice((0, 1, 2, 4)))
            ),
            region=random.choice(places),
            shows=random.choice(names) if random.random() < 0.05 else "",
            chooses=random.random() < 0.1,
            joins=random.random() < 0.2,
        )
        for index, name in enumerate(names[:num_nodes])
    ]
    return _workflow(nodes, random.choice(names), regions)


def hostile_graph(random: Random) -> Workflow:
    """Any of these."""
    kind = random.random()
    if kind < 0.2:
        return sound_graph(random)
    if kind < 0.6:
        return _made(graph_with_mistakes, random)
    if kind < 0.9:
        num_nodes, width = random.choice((5, 8, 8, 12, 30, MOST_NODES)), random.choice((1, 2, 3, 6))
        return tangle(random, num_nodes, width, random.choice((0, 0, 1, 3, 60)), random.choice((0, 0, 1, 2)))
    if kind < 0.91:
        return tangle(random, MOST_NODES, MOST_INPUTS - 1, random.choice((0, 1, 3, 60)))
    return noise(random)


def _made(make: Callable[[Random], Workflow], random: Random) -> Workflow:
    """A graph in which no two nodes and no two regions have one name, which a Workflow refuses when it is made."""
    while True:
        try:
            return make(random)
        except WorkflowError as error:
            if "are named" not in str(error):
                raise
