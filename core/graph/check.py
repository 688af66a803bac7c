"""Checks a workflow before anything of it runs. Each error names the node and the input that are wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import get_args

from core.errors import WorkflowError
from core.graph.op import OPS, Port
from core.graph.port_checks import port_of, problems_of_ends, problems_of_ports
from core.graph.risks import NEVER, Risks
from core.graph.skipping import readers_of
from core.graph.workflow import Edge, Node, Workflow, inputs_of, op_of, outputs_of, role_of
from core.interpolation import Interpolation


def check_workflow(workflow: Workflow) -> None:
    """Raise WorkflowError unless the workflow can run: ops are registered, values fit their readers, no node waits for
    itself, regions carry something, and the output is always made.
    """
    _check_names(workflow)
    _check_order(workflow)
    for node in workflow.nodes:
        _check_node(workflow, node)
    _check_ends(workflow)
    _check_roles(workflow)
    for node in workflow.nodes:
        for edge in node.inputs:
            _check_edge(workflow, node, edge)
    _check_regions(workflow)
    _check_outputs(workflow)
    risks = Risks(workflow)
    _check_skipped_together(workflow, risks)
    for name in workflow.output_names:
        _check_is_made(workflow, name, risks)
    for node in workflow.nodes:
        _check_purpose(workflow, node)


def _fail(workflow: Workflow, node: Node, problem: str, edge: Edge | None = None) -> WorkflowError:
    return _fail_at(workflow, node, "" if edge is None else edge.input, problem)


def _fail_at(workflow: Workflow, node: Node, input: str, problem: str) -> WorkflowError:
    where = f"{node.name}, input {input}" if input else node.name
    return WorkflowError(f"workflow {workflow.name}, node {where}: {problem}", node=node.name, input=input)


# ---------------------------------------------------------------------------------------------------- the graph


def _check_names(workflow: Workflow) -> None:
    if any(not node.name for node in workflow.nodes):
        raise WorkflowError(f"workflow {workflow.name}: a node has no name", node="")
    if any(not region.name for region in workflow.regions):
        raise WorkflowError(f"workflow {workflow.name}: a region has no name", node="")


def _check_order(workflow: Workflow) -> None:
    for node in workflow.nodes:
        for edge in node.inputs:
            if workflow.find(edge.source) is None:
                raise _fail(workflow, node, f"there is no node {edge.source}", edge)
    seen: set[str] = set()
    for node in workflow.nodes:
        for edge in node.inputs:
            if edge.source not in seen:
                _check_cycles(workflow, {node.name: node.name for node in workflow.nodes}, "a cycle")
                raise _fail(workflow, node, f"list the node after {edge.source}, which it reads", edge)
        seen.add(node.name)


def _check_cycles(workflow: Workflow, places: Mapping[str, str], problem: str) -> None:
    """places: node -> the node that stands for all nodes in one place. An edge within a place makes no cycle, but one
    from a node to itself does.
    """
    sources: dict[str, dict[str, tuple[Node, Edge]]] = {}  # place -> place that it reads -> where
    for node in workflow.nodes:
        place = places[node.name]
        mine = sources.setdefault(place, {})
        for edge in node.inputs:
            if places[edge.source] != place or edge.source == node.name:
                mine.setdefault(places[edge.source], (node, edge))
    try:
        TopologicalSorter(sources).prepare()
    except CycleError as error:
        way: list[str] = error.args[1]  # each place is read by the next one; the last is the first
        node, edge = sources[way[1]][way[0]]
        raise _fail(workflow, node, f"{problem}: {' -> '.join(way)}", edge) from error


# ---------------------------------------------------------------------------------------------------- one node


def _check_node(workflow: Workflow, node: Node) -> None:
    if node.op not in OPS:
        raise _fail(workflow, node, f"there is no op {node.op}")
    _check_own_ports(workflow, node)
    connected = Counter((*(edge.input for edge in node.inputs), *node.given))
    if OPS[node.op].has_own_ports:
        connected.update(node.literals.keys())
    for port in inputs_of(node):
        if not port.is_optional and not connected[port.name]:
            raise WorkflowError(
                f"workflow {workflow.name}, node {node.name}: its input {port.name} is not connected",
                node=node.name,
                input=port.name,
            )
    for name, times in connected.items():
        if times > 1:
            raise _fail_at(workflow, node, name, "it is connected more than once")
    _check_literals(workflow, node)
    if node.shows:
        _check_side(workflow, node)
    if node.chooses:
        _check_chooser(workflow, node)


def _check_own_ports(workflow: Workflow, node: Node) -> None:
    if OPS[node.op].has_own_ports:
        for name, problem in problems_of_ports(workflow, node):
            raise _fail_at(workflow, node, name, problem)
    elif node.takes or node.makes or node.given:
        raise _fail(workflow, node, f"op {node.op} has ports already, and takes no others")


def _check_ends(workflow: Workflow) -> None:
    """Nodes with ports of their own say what requests give and get. Beside other nodes they work for a picture."""
    if not workflow.has_own_ports:
        if workflow.output_ports:
            raise WorkflowError(f"workflow {workflow.name}: output_ports are of nodes with ports of their own", node="")
        return
    for name, problem in problems_of_ends(workflow):
        raise WorkflowError(f"workflow {workflow.name}, {name}: {problem}", node="", input=name)
    _check_previews(workflow)


def _check_previews(workflow: Workflow) -> None:
    """No preview slips past a node that the picture passes, of those with ports of their own."""
    maker = workflow.find(workflow.outputs.get("picture", ""))
    if maker is None or not workflow.is_for_pictures:
        return
    for side in workflow.side_nodes:
        if workflow.is_preview(side) and not _is_alike(workflow, side, maker):
            what = f"callers would see what does not pass all nodes that the picture of {maker.name} passes"
            raise _fail(workflow, side, f"{what}; let side nodes that are as these are do the same, or leave it out")


_ALIKE = ("op", "role", "takes", "makes", "given", "literals", "chooses", "joins")
"""What nodes that are alike have in common."""


def _is_alike(workflow: Workflow, side: Node, maker: Node) -> bool:
    """Whether a side node makes of a round what the picture's maker makes of the last one: it is as that is, and reads
    what other nodes make for both, or side nodes that are alike likewise, down to those that decode. All classes that
    pictures have passed before these it has before it, too.
    """
    left, seen = [(side, maker)], set[tuple[str, str]]()
    while left:
        mine, its = left.pop()
        if (mine.name, its.name) in seen:
            continue
        seen.add((mine.name, its.name))
        if any(getattr(mine, name) != getattr(its, name) for name in _ALIKE):
            return False
        if OPS[its.op].makes_result:
            if not workflow.classes_before(its.name) <= workflow.classes_before(mine.name):
                return False
            continue
        ends = [{edge.input: (edge.source, edge.name) for edge in each.inputs} for each in (mine, its)]
        if ends[0].keys() != ends[1].keys():
            return False
        for input_, (source, name) in ends[0].items():
            other, its_name = ends[1][input_]
            if name != its_name or (source != other and not workflow.node(source).shows):
                return False
            if source != other:
                left.append((workflow.node(source), workflow.node(other)))
    return True


def _check_roles(workflow: Workflow) -> None:
    """One model plays a role, by its components of one kind."""
    players: dict[str, Node] = {}  # role -> the first node that needs it
    for node in workflow.nodes:
        first = players.setdefault(role_of(node), node)
        kind, first_kind = OPS[node.op].component, OPS[first.op].component
        if kind != first_kind:
            role = f"its role {role_of(node)} is played by a {kind}"
            raise _fail(workflow, node, f"{role}, and that of {first.name} by a {first_kind}")


def _check_literals(workflow: Workflow, node: Node) -> None:
    for name in node.literals:
        if name not in OPS[node.op].literals and not OPS[node.op].has_own_ports:
            raise _fail(workflow, node, f"op {node.op} takes no literal {name}")
    if not OPS[node.op].has_own_ports:
        for name, value in node.literals.items():
            wanted = _LITERALS.get(name, type(value))
            is_known = name != "method" or value in get_args(Interpolation)
            if type(value) is not wanted or not is_known or (name == "seed" and not 0 <= int(value) < 2**63):
                raise _fail(workflow, node, f"its literal {name} cannot be {value!r:.40}, of type {wanted.__name__}")
    if not OPS[node.op].has_own_ports and node.canvas and node.canvas not in workflow.canvases:
        raise _fail(workflow, node, f"the workflow has no canvas {node.canvas}")


_LITERALS: Mapping[str, type] = {"canvas": str, "method": str, "seed": int, "noise_first": bool, "starts_over": bool}
"""Literal of an op -> the type of its value."""


def _check_purpose(workflow: Workflow, node: Node) -> None:
    op, begun = OPS[node.op], workflow.begun_by.get(node.name, ())
    if op.begins_region and len(begun) != 1:
        what = f"it begins {' and '.join(begun)}" if begun else "it begins no region"
        raise _fail(workflow, node, f"{what}; nodes of op {op.name} make the first values of one")
    if op.makes_result and not (node.shows or node.name in workflow.output_names or _is_read(workflow, node)):
        raise _fail(workflow, node, "its result reaches nobody: make it an output, or let it show another node")


def _is_read(workflow: Workflow, node: Node) -> bool:
    return node.name in workflow.reader_names


def _check_side(workflow: Workflow, node: Node) -> None:
    """A side node runs after some rounds of a node, while the rounds go on."""
    shown = workflow.find(node.shows)
    if node.region or shown is None or not shown.region:
        raise _fail(workflow, node, f"a side node shows a node that repeats, which {node.shows} is not")
    for edge in node.inputs:
        if edge.source != node.shows and workflow.node(edge.source).region == shown.region:
            problem = f"of region {shown.region}, a side node that shows {node.shows} reads no other node"
            raise _fail(workflow, node, problem, edge)


def _check_chooser(workflow: Workflow, node: Node) -> None:
    if node.region or node.shows:
        raise _fail(workflow, node, "a node that runs several times cannot choose a reader")
    if len(readers_of(workflow, node.name)) < 2:
        raise _fail(workflow, node, "a node that chooses needs two readers")


# ---------------------------------------------------------------------------------------------------- one edge


def _check_edge(workflow: Workflow, node: Node, edge: Edge) -> None:
    source = workflow.node(edge.source)
    if source.shows and node.shows != source.shows:
        what = f"of what a side node makes, as {source.name} is, side nodes that show {source.shows} can read alone"
        raise _fail(workflow, node, what, edge)
    made = _output(workflow, node, edge, source)
    read = port_of(inputs_of(node), edge.input)
    if read is None:
        raise _fail(workflow, node, f"op {node.op} has no input {edge.input}", edge)
    if made.type != read.type:
        raise _fail(workflow, node, f"it takes {read.type}, and {edge.source}.{edge.name} is {made.type}", edge)
    _check_form(workflow, node, edge, made, read)
    if op_of(node).begins_region and read.type == "picture" and workflow.is_mask_aware:
        problem = "mask-aware steps read pages of the request's own picture; let the workflow be none (is_mask_aware)"
        raise _fail(workflow, node, problem, edge)
    if edge.carried:
        _check_carried(workflow, node, edge, made, read)
    if edge.deferred:
        _check_deferred(workflow, node, edge, made)


def _check_deferred(workflow: Workflow, node: Node, edge: Edge, made: Port) -> None:
    """A value can be awaited in the reader's work only if it is sure to be made, once, unless its source fails."""
    source = workflow.node(edge.source)
    if node.shows:
        raise _fail(workflow, node, "a side node cannot read deferred", edge)
    if source.chooses:
        raise _fail(workflow, node, f"{source.name} chooses which of its readers run, so none can begin before", edge)
    if OPS[source.op].pages == "span":
        raise _fail(workflow, node, f"a run of {source.name} may be repeated, so it cannot be read deferred", edge)
    if made.is_optional:
        raise _fail(workflow, node, f"{source.name} may make no {edge.name}, so it cannot be read deferred", edge)


def _check_form(workflow: Workflow, node: Node, edge: Edge, made: Port, read: Port) -> None:
    """Ports of an op have no form: values of their type are as the op knows them."""
    problem = read.form.why_not_from(made.form) if read.form is not None and made.form is not None else ""
    if problem:
        raise _fail(workflow, node, problem, edge)


def _check_carried(workflow: Workflow, node: Node, edge: Edge, made: Port, read: Port) -> None:
    by = workflow.find(edge.carried)
    if by is None or not node.region or by.region != node.region:
        raise _fail(workflow, node, f"it is carried by {edge.carried}, which is no node of its region", edge)
    if workflow.node(edge.source).region == node.region:
        raise _fail(
            workflow, node, f"the first value comes from outside of the region, and {edge.source} is in it", edge
        )
    if edge.deferred:
        raise _fail(workflow, node, "what is carried from round to round cannot be deferred", edge)
    port = _output(workflow, node, edge, by)
    if port.type != made.type:
        raise _fail(workflow, node, f"{by.name}.{edge.name} is {port.type}, and the first one {made.type}", edge)
    _check_form(workflow, node, edge, port, read)


def _output(workflow: Workflow, node: Node, edge: Edge, source: Node) -> Port:
    """The output of a node that an edge reads."""
    port = port_of(outputs_of(source), edge.name)
    if port is None:
        raise _fail(workflow, node, f"{source.name} makes no {edge.name}", edge)
    return port


# ---------------------------------------------------------------------------------------------------- the whole


def _check_regions(workflow: Workflow) -> None:
    found: dict[str, list[Node]] = {region.name: [] for region in workflow.regions}
    for node in workflow.nodes:
        if node.region and node.region not in found:
            raise _fail(workflow, node, f"there is no region {node.region}")
        if node.region:
            found[node.region].append(node)
    for name, nodes in found.items():
        if not nodes:
            raise WorkflowError(f"workflow {workflow.name}: region {name} has no nodes", node=name)
        if not any(edge.carried for node in nodes for edge in node.inputs):
            raise _fail(workflow, nodes[0], f"region {name} carries nothing from one round to the next")
    stands_for = {name: nodes[0].name for name, nodes in found.items()}
    places = {node.name: stands_for.get(_rounds_of(workflow, node), node.name) for node in workflow.nodes}
    _check_cycles(workflow, places, "a way out of a region and back into it (a region goes by its first node)")


def _rounds_of(workflow: Workflow, node: Node) -> str:
    """The region whose rounds wait for a node, in which it is or which it shows; "": none."""
    return workflow.node(node.shows).region if node.shows else node.region


def _check_skipped_together(workflow: Workflow, risks: Risks) -> None:
    """Rounds of a region wait for one another, and for the side nodes that show them, so either all of these nodes are
    skipped or none.
    """
    first: dict[str, Node] = {}  # region -> one of these nodes
    for node in workflow.nodes:
        region = _rounds_of(workflow, node)
        other = first.setdefault(region, node) if region else node
        if risks.of(node.name) != risks.of(other.name):
            more, less = (node, other) if risks.of(node.name) & ~risks.of(other.name) else (other, node)
            extra = risks.of(more.name) & ~risks.of(less.name)
            edge = next((edge for edge in more.inputs if risks.of_edge(more, edge) & extra), None)
            raise _fail(workflow, more, f"it may be skipped without {less.name}, though rounds wait for both", edge)


def _check_outputs(workflow: Workflow) -> None:
    if not workflow.outputs:
        raise WorkflowError(f"workflow {workflow.name} has no output", node="")
    if len(workflow.output_names) < len(workflow.outputs) and not workflow.has_own_ports:
        raise WorkflowError(f"workflow {workflow.name}: two outputs are of one node", node="")
    for name, maker in workflow.outputs.items():
        node = workflow.find(maker)
        if node is None:
            raise WorkflowError(f"workflow {workflow.name}, output {name}: there is no node {maker}", node=maker)
        if node.region or node.shows:
            raise _fail(workflow, node, "an output must run once")
    after = workflow.downstream(workflow.output_names)
    for side in workflow.side_nodes:
        for edge in side.inputs:
            if edge.source != side.shows and edge.source in after:
                problem = "it waits for an output, and outputs wait for all side nodes that are due"
                raise _fail(workflow, side, problem, edge)


def _check_is_made(workflow: Workflow, name: str, risks: Risks) -> None:
    """An output is sure to be made, whatever is chosen."""
    choices = risks.may_skip(name)
    if choices is None:
        return
    node = workflow.node(name)
    if choices:
        how = " and ".join(f"{chooser} chooses {reader}" for chooser, reader in choices.items())
        raise _fail(workflow, node, f"the output is skipped if {how}")
    if risks.of(name) == NEVER:
        problem = "the output is never made: it, or a node that it reads, needs two branches of a choice and joins none"
        raise _fail(workflow, node, problem)
    joints = ", ".join(risks.joints(name))
    rule = "let all branches of one choice meet in one node that joins, before they meet those of another choice"
    raise _fail(workflow, node, f"the output is not sure to be made, because of what {joints} joins; {rule}")
