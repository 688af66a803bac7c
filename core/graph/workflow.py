"""Workflow: the ops of making an image as a graph of nodes, their inputs, and which of them repeat.

A workflow is data. Nodes run once, once per round of a region (a loop), or beside a region, to show its state. A
request's progress (`core.graph.progress`) counts how often each of its nodes has run; there is no phase enum, so new
graphs need no new scheduler.

    text_encode  --prompt embeddings-----------+
                                               v
    image_encode --latents, condition, ...---> denoise (x steps) --latents--> decode
                                               |
                                               +--clean--> preview (after some steps)

The shipped ones are in `core.graph.workflows`, a file each.

Nodes that run users' classes (op `run`) have ports of their own. They may stand among other nodes:

    ... denoise --latents--> decode --picture--> guard --image--> the request's picture

    Node("guard", "run", role="guard", inputs=(Edge("decode", "picture", "image"),), given={"words": "prompt"},
         takes=(Port.of("image", picture(2048, 2048)), Port.of("words", text(4096))),
         makes=(Port.of("image", picture(2048, 2048)), Port.of("score", NUMBER)))
    outputs={"picture": "guard", "score": "guard"}, output_ports={"picture": "image", "score": "score"}

- They read decoded pictures, what other classes make, and the workflow's inputs that have a form: `prompt` is the
  request's, values of the others come with the request. An `image_encode` may read a picture as its template.
- A decoded picture that is no output is in no memory that callers see, and a picture that a class makes is as large as
  the request's. Where one stands between `decode` and the picture, previews pass through a side node that is as it is,
  and reads the side node that decodes; without such a node there are none.
- It sees the picture as it was generated: at the size that the model works at; of a padded crop, that crop; around the
  mask, the template. What it makes is then resized and pasted into the upload under the mask, with a soft edge if that
  is asked for, as any decoded picture is. So outside of the mask callers always get their own upload, and what a class
  changes there has no effect. Templates made of results are made of the pasted picture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from core.errors import WorkflowError
from core.graph.op import OPS, Op, Port


@dataclass(frozen=True, slots=True)
class Edge:
    """An input of a node: a value that another node makes. Of a node that repeats, readers outside of its region get
    the value of the last round, and readers inside that of the same round.
    """

    source: str  # the node that makes the value
    name: str  # of the value, one of the outputs of the source's op
    port: str = ""  # input of the reader's op that gets it; "": the one with the value's name
    # A node of the reader's region: from the second round on, the reader gets what this node has made in the round
    # before, under the same name.
    carried: str = ""
    deferred: bool = False  # read late in the reader's work: it may start as soon as the source has been started

    @property
    def input(self) -> str:
        """Name of the reader's input."""
        return self.port or self.name


Literal = str | int | float | bool
"""A constant that a workflow gives to one of its nodes."""

Number = str | float
"""A number of a request: the name of one of its sampling parameters, or the number itself."""


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes that repeat together: a round for each computed step of a part of the noise schedule."""

    name: str
    strength: Number = "strength"  # the share of the schedule that sampling runs, the last one, 0..1
    # Of all noise levels, the highest counted as 0 and the lowest as 1: those of this region's steps.
    begin: Number = 0.0
    end: Number = 1.0
    # Of nodes with ports of their own: how many rounds, or the input that says it; 0: the request says it apart.
    rounds: str | int = 0
    steps: int = 0  # of denoising steps: of the whole schedule; 0: as many as the request has

    @property
    def is_part(self) -> bool:
        """Whether other steps come before or after its own. Which step is the first or last of them depends on the
        sampler, so it is known only when the region's first values are made."""
        return self.begin != 0.0 or self.end != 1.0


@dataclass(frozen=True, slots=True)
class Node:
    """One vertex of the graph."""

    name: str
    op: str  # name of its Op
    inputs: tuple[Edge, ...] = ()
    role: str = ""  # of the model that it needs; "": named as its op's kind of component
    region: str = ""  # it runs once per round of this region; "": once
    shows: str = ""  # a side node: it runs after some rounds of this node, and reads what these rounds have made
    chooses: bool = False  # its result names the one of its readers that runs; the others are skipped
    joins: bool = False  # it runs although some of its sources are skipped, on what the others have made
    # By name, as its op takes them; a node with ports of its own gets each as the input of this name.
    literals: Mapping[str, Literal] = field(default_factory=dict, hash=False)
    # Of a node with ports of its own, whose role is a class. given: its input -> the workflow's, which a request gives.
    takes: tuple[Port, ...] = ()
    makes: tuple[Port, ...] = ()
    given: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def canvas(self) -> str:
        """Which of the request's canvases it works at; "": that of the final picture, or it has ports of its own."""
        return "" if self.makes else str(self.literals.get("canvas", ""))


@dataclass(frozen=True, slots=True)
class Links:
    """The nodes that one node waits for."""

    before: tuple[str, ...]  # outside of its region: until they are over
    begun: tuple[str, ...]  # outside of its region, read deferred: until they are sent
    same_round: tuple[str, ...]  # of its region: until their same round is done
    same_round_begun: tuple[str, ...]  # of its region, read deferred: until their same round is sent
    last_round: tuple[str, ...]  # of its region, carried: until their round before is sent
    sides: tuple[str, ...]  # side nodes, which a side node reads: until they are done with the round that it shows


@dataclass(frozen=True, slots=True)
class Reads:
    """The edges of one node."""

    fixed: tuple[Edge, ...]  # each of its runs reads the same value
    of_round: tuple[Edge, ...]  # each of its runs reads another value
    overlap: bool  # the first run reads a fixed value as one of its round, too
    # (node, value) that each run but the first reads, each once, if all of `of_round` are carried; else ().
    carried: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Workflow:
    """A directed graph of nodes, each listed after those that it reads. `core.graph.check` finds what is wrong."""

    name: str
    nodes: tuple[Node, ...]
    # Name of a result -> the node that makes it. A request ends with the last of them.
    outputs: Mapping[str, str] = field(hash=False)
    # Name of a result -> the output of its node, for nodes with ports of their own. Where other nodes work for a
    # picture beside them, that is the result "picture".
    output_ports: Mapping[str, str] = field(default_factory=dict, hash=False, kw_only=True)
    regions: tuple[Region, ...] = ()
    inputs: tuple[Port, ...] = ()  # what a request gives
    # Name -> how many times smaller than the final one.
    canvases: Mapping[str, Number] = field(default_factory=dict, hash=False)
    is_mask_aware: bool = False  # its steps may compute the active tokens alone
    # Name of an adapter of the model that it serves, which all its requests have -> its scale.
    loras: Mapping[str, float] = field(default_factory=dict, hash=False)
    approximate_caching: bool = False  # see SamplingParams; of requests that say nothing
    steps_without_lora: int = 0  # see SamplingParams; of requests that say less
    # Field of requests for pictures -> its value in those over HTTP that leave it out.
    defaults: Mapping[str, Literal] = field(default_factory=dict, hash=False)

    @property
    def title(self) -> str:
        """The name that users give it: without what follows "@", the digest of its content, where that is known."""
        return self.name.partition("@")[0]

    def node(self, name: str) -> Node:
        """Raises KeyError that names it."""
        return self._by_name[name]

    def find(self, name: str) -> Node | None:
        """The node of this name; None: there is none."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def output_names(self) -> Mapping[str, str]:
        """Node that makes a result -> name of the result, or of one of them."""
        return {node: name for name, node in self.outputs.items()}

    def results_of(self, node: Node) -> Mapping[str, str]:
        """Name of each result that a node with ports of its own makes -> the output that is the result."""
        return self._results.get(node.name, {})

    @cached_property
    def _results(self) -> Mapping[str, Mapping[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for name, port in self.output_ports.items():
            found.setdefault(self.outputs[name], {})[name] = port
        return found

    @cached_property
    def has_own_ports(self) -> bool:
        """Whether any of its nodes have ports of their own."""
        return any(op_of(node).has_own_ports for node in self.nodes)

    @cached_property
    def is_for_pictures(self) -> bool:
        """Whether any of its nodes have the ports of their op. Those work for a picture, or a mask."""
        return not all(op_of(node).has_own_ports for node in self.nodes)

    @cached_property
    def last_between(self) -> Node | None:
        """The last node with ports of its own that decoded pictures pass on their way to a request's picture; None:
        the request gets it as it was decoded.
        """
        classes = self.classes_before(self.outputs.get("picture", ""))
        return next((node for node in reversed(self.nodes) if node.name in classes), None)

    @cached_property
    def has_previews(self) -> bool:
        """Whether requests may ask for partial images: these pass through all that the picture passes through."""
        return self.last_between is None or bool(self.side_nodes)

    def classes_before(self, name: str) -> set[str]:
        """Names of the nodes with ports of their own, up to a node itself, that decoded pictures pass on their way to
        it. Side nodes decode for themselves alone.
        """
        after = self._after_decoding & self._upstream(name)
        return {each for each in after if op_of(self.node(each)).has_own_ports}

    @cached_property
    def _after_decoding(self) -> set[str]:
        return self.downstream(node.name for node in self.nodes if op_of(node).makes_result and not node.shows)

    def _upstream(self, name: str) -> set[str]:
        """A node and all that it reads, directly or not."""
        found = {name}
        for node in reversed(self.nodes):
            if node.name in found:
                found.update(edge.source for edge in node.inputs)
        return found

    @cached_property
    def picture_ports(self) -> tuple[tuple[Node, Port], ...]:
        """(node, port of its own) of each port where the picture of a request goes in, as other nodes make it, or comes
        out, as the request gets it.
        """
        found = list[tuple[Node, Port]]()
        for node in self.nodes if self.is_for_pictures else ():
            if not op_of(node).has_own_ports:
                continue
            read = {edge.input for edge in node.inputs if not op_of(self.node(edge.source)).has_own_ports}
            found += [(node, port) for port in node.takes if port.name in read]
            made = self.results_of(node).get("picture", "")
            found += [(node, port) for port in node.makes if port.name == made]
        return tuple(found)

    @cached_property
    def own_inputs(self) -> tuple[Port, ...]:
        """Its inputs that nodes with ports of their own take. All others are fields of requests for pictures."""
        return tuple(port for port in self.inputs if port.form is not None)

    @cached_property
    def own_results(self) -> tuple[Port, ...]:
        """What nodes with ports of their own make for the request, each by the name of the result; the picture of a
        request for one is not among them: it has its own place.
        """
        found = list[Port]()
        for name, output in self.output_ports.items():
            made = next((port for port in self.node(self.outputs[name]).makes if port.name == output), None)
            if made is not None and made.form is not None and not (self.is_for_pictures and name == "picture"):
                found.append(Port.of(name, made.form))
        return tuple(found)

    @cached_property
    def last_output(self) -> Node:
        """The node listed last among those that make results."""
        return next(node for node in reversed(self.nodes) if node.name in self.output_names)

    @cached_property
    def begins(self) -> Mapping[str, Region]:
        """Name of a node -> the region whose first values it makes."""
        regions = {region.name: region for region in self.regions}
        return {source: regions[names[0]] for source, names in self.begun_by.items()}

    @cached_property
    def begun_by(self) -> Mapping[str, Sequence[str]]:
        """Name of a node -> names of the regions whose first values it makes."""
        found: dict[str, dict[str, None]] = {}
        for node in self.nodes:
            for edge in node.inputs if node.region else ():
                if edge.carried:
                    found.setdefault(edge.source, {})[node.region] = None
        return {source: tuple(names) for source, names in found.items()}

    @cached_property
    def followed(self) -> frozenset[str]:
        """Names of the regions after which other regions' rounds come."""
        found = set[str]()
        after: dict[str, set[str]] = {}  # node -> its own region, or else those that it comes after
        for node in self.nodes:
            mine = set[str]().union(*(after.get(edge.source, ()) for edge in node.inputs))
            if node.region:
                found |= mine - {node.region}
                mine = {node.region}
            after[node.name] = mine
        return frozenset(found)

    def nodes_of(self, region: str) -> tuple[Node, ...]:
        """The nodes of a region."""
        return self._by_region[region]

    @cached_property
    def _by_region(self) -> Mapping[str, tuple[Node, ...]]:
        names = [region.name for region in self.regions]
        return {name: tuple(node for node in self.nodes if node.region == name) for name in names}

    @cached_property
    def links(self) -> Mapping[str, Links]:
        """Node name -> the nodes that it waits for."""
        return {node.name: self._links_of(node) for node in self.nodes}

    @cached_property
    def reads(self) -> Mapping[str, Reads]:
        """Node name -> its edges."""
        return {node.name: self._reads_of(node) for node in self.nodes}

    @cached_property
    def readers(self) -> Mapping[tuple[str, str], tuple[tuple[Node, tuple[Edge, ...]], ...]]:
        """(node, name of a value that it makes) -> the nodes that read it in some round, each with the edges."""
        found: dict[tuple[str, str], dict[str, list[Edge]]] = {}
        for node in self.nodes:
            for edge in node.inputs:
                for source in filter(None, (edge.source, edge.carried)):
                    found.setdefault((source, edge.name), {}).setdefault(node.name, []).append(edge)
        return {
            key: tuple((self.node(name), tuple(edges)) for name, edges in readers.items())
            for key, readers in found.items()
        }

    @cached_property
    def reader_names(self) -> Mapping[str, tuple[str, ...]]:
        """Name of a node that is read -> names of the nodes that read what it makes, in graph order."""
        found: dict[str, dict[str, None]] = {}
        for node in self.nodes:
            for edge in node.inputs:
                found.setdefault(edge.source, {})[node.name] = None
        return {source: tuple(names) for source, names in found.items()}

    @cached_property
    def reads_in_rounds(self) -> Mapping[tuple[str, str], int]:
        """(node that repeats, name of a value) -> how often nodes of its region read the value of one round that is not
        the last: in the same round and in the next.
        """
        found = Counter[tuple[str, str]]()
        for node in self.nodes:
            if node.region:
                ways = {(e.source, e.name, "same") for e in node.inputs if self.node(e.source).region == node.region}
                ways |= {(edge.carried, edge.name, "next") for edge in node.inputs if edge.carried}
                found.update((source, name) for source, name, _ in ways)
        return found

    @cached_property
    def sides(self) -> Mapping[str, tuple[Node, ...]]:
        """Name of a node that repeats -> the side nodes that show it."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.shows:
                found.setdefault(node.shows, []).append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    @cached_property
    def side_nodes(self) -> tuple[Node, ...]:
        """All side nodes."""
        return tuple(node for node in self.nodes if node.shows)

    def is_preview(self, node: Node) -> bool:
        """Whether callers see what a side node makes: no other side node reads it."""
        return bool(node.shows) and node.name not in self.reader_names

    @cached_property
    def steps(self) -> tuple[Node, ...]:
        """The nodes that repeat and share a pass with those of other requests: denoising steps, and what works for
        them."""
        return tuple(node for node in self.nodes if node.region and op_of(node).sharing == "together")

    @cached_property
    def counted_steps(self) -> tuple[Node, ...]:
        """Those of them that are steps of a request's picture, without what works for these beside them."""
        return tuple(node for node in self.steps if not op_of(node).serves_step)

    @cached_property
    def step_names(self) -> frozenset[str]:
        """Names of these."""
        return frozenset(node.name for node in self.steps)

    @cached_property
    def roles(self) -> Mapping[str, str]:
        """Role -> kind of component that plays it."""
        return {role_of(node): op_of(node).component for node in self.nodes}

    @cached_property
    def class_names(self) -> frozenset[str]:
        """Names of the classes that play roles of its nodes with ports of their own."""
        return frozenset(role_of(node) for node in self.nodes if op_of(node).has_own_ports)

    @cached_property
    def paged(self) -> Node | None:
        """The node that reads the template's pages in mask-aware requests; None: there is none."""
        return next((node for node in self.nodes if not node.canvas and op_of(node).pages == "span"), None)

    @cached_property
    def after_rounds(self) -> frozenset[str]:
        """Names of the nodes after the last rounds, which read what rounds have made, and of side nodes."""
        repeating = {node.name for node in self.nodes if node.region}
        before = set(repeating)  # these nodes, and all that they read, directly or not
        for node in reversed(self.nodes):
            if node.name in before:
                before.update(edge.source for edge in node.inputs)
        return frozenset(self.downstream(repeating) - before)

    @cached_property
    def finishing(self) -> frozenset[str]:
        """Names of the nodes that make results, and of all others after the last rounds but side nodes."""
        sides = {node.name for node in self.side_nodes}
        return frozenset(self.output_names) | (self.after_rounds - sides)

    def downstream(self, names: Iterable[str]) -> set[str]:
        """These nodes and all that read what they make, directly or not."""
        found = set(names)
        left = list(found)
        while left:
            readers = set(self.reader_names.get(left.pop(), ())) - found
            found |= readers
            left += readers
        return found

    def repeated_with(self, region: str) -> set[str]:
        """Names of the nodes that run again when a region begins again: its own, those that made the first values of
        what it carries, which its first round has used up, and all after them.
        """
        mine = [node for node in self.nodes if node.region == region]
        first = {edge.source for node in mine for edge in node.inputs if edge.carried}
        return {node.name for node in mine} | first | self.downstream({node.name for node in mine})

    def _reads_of(self, node: Node) -> Reads:
        of_round = tuple(edge for edge in node.inputs if self._is_of_round(node, edge))
        fixed = tuple(edge for edge in node.inputs if not self._is_of_round(node, edge))
        overlap = not {(e.source, e.name) for e in fixed}.isdisjoint((e.source, e.name) for e in of_round)
        carried = dict.fromkeys((e.carried, e.name) for e in of_round) if all(e.carried for e in of_round) else ()
        return Reads(fixed, of_round, overlap, tuple(carried))

    def _is_of_round(self, node: Node, edge: Edge) -> bool:
        source = self.node(edge.source)
        is_inside = bool(node.region) and source.region == node.region
        return bool(edge.carried) or is_inside or edge.source == node.shows or bool(source.shows)

    def is_read_early(self, name: str) -> bool:
        """Whether a node may begin while this one, which it reads, is in flight."""
        return name in self._read_early

    @cached_property
    def _read_early(self) -> frozenset[str]:
        return frozenset(edge.source for node in self.nodes for edge in node.inputs if edge.deferred)

    def _links_of(self, node: Node) -> Links:
        mine: dict[str, dict[str, None]] = {kind: {} for kind in Links.__slots__}
        for edge in node.inputs:
            source = self._by_name.get(edge.source)
            if source is None or edge.source == node.shows:
                continue  # of what a side node shows, it waits for some rounds
            is_inside = bool(node.region) and source.region == node.region
            if source.shows:
                mine["sides"][edge.source] = None
            elif is_inside:
                mine["same_round_begun" if edge.deferred else "same_round"][edge.source] = None
            else:
                mine["begun" if edge.deferred else "before"][edge.source] = None
            if edge.carried and edge.carried != node.name:  # its own round before it was sent before
                mine["last_round"][edge.carried] = None
        return Links(**{kind: tuple(names) for kind, names in mine.items()})

    def __post_init__(self) -> None:
        """Raises WorkflowError for a name that stands for two nodes or regions."""
        for kind, names in (("nodes", [n.name for n in self.nodes]), ("regions", [r.name for r in self.regions])):
            twice = next((name for name, times in Counter(names).items() if times > 1), None)
            if twice is not None:
                raise WorkflowError(f"workflow {self.name}: two {kind} are named {twice}", node=twice)


def op_of(node: Node) -> Op:
    """A node's op. Raises KeyError if none of this name is registered."""
    return OPS[node.op]


def inputs_of(node: Node) -> tuple[Port, ...]:
    """What a node may read. Raises KeyError if its op is not registered."""
    return node.takes if (op := op_of(node)).has_own_ports else op.inputs


def outputs_of(node: Node) -> tuple[Port, ...]:
    """What a node makes. Raises KeyError if its op is not registered."""
    return node.makes if (op := op_of(node)).has_own_ports else op.outputs


def role_of(node: Node) -> str:
    """A node's role. Raises KeyError if its op is not registered."""
    return node.role or op_of(node).component
