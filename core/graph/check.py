"""Checks a workflow before anything of it runs. Each error names the node and the input that are wrong."""

from __future__ import annotations

from collections import Counter
from graphlib import CycleError, TopologicalSorter

from core.errors import WorkflowError
from core.graph.op import OPS, Port
from core.graph.skipping import may_skip, readers_of
from core.graph.workflow import Edge, Node, Workflow, role_of


def check_workflow(workflow: Workflow) -> None:
    """Raise WorkflowError unless the workflow can run: ops are registered, values fit their readers, no node waits for
    itself, regions carry something, and the output is always made.
    """
    _check_order(workflow)
    for node in workflow.nodes:
        _check_node(workflow, node)
        for edge in node.inputs:
            _check_edge(workflow, node, edge)
    _check_regions(workflow)
    _check_outputs(workflow)


def _fail(workflow: Workflow, node: Node, problem: str, edge: Edge | None = None) -> WorkflowError:
    name = "" if edge is None else edge.input
    where = node.name if edge is None else f"{node.name}, input {name}"
    return WorkflowError(f"workflow {workflow.name}, node {where}: {problem}", node=node.name, input=name)


# ---------------------------------------------------------------------------------------------------- the graph


def _check_order(workflow: Workflow) -> None:
    names = {node.name for node in workflow.nodes}
    for node in workflow.nodes:
        for edge in node.inputs:
            if edge.source not in names:
                raise _fail(workflow, node, f"there is no node {edge.source}", edge)
    _check_cycles(workflow)
    seen: set[str] = set()
    for node in workflow.nodes:
        for edge in node.inputs:
            if edge.source not in seen:
                raise _fail(workflow, node, f"list the node after {edge.source}, which it reads", edge)
        seen.add(node.name)


def _check_cycles(workflow: Workflow) -> None:
    sources = {node.name: list(dict.fromkeys(edge.source for edge in node.inputs)) for node in workflow.nodes}
    try:
        TopologicalSorter(sources).prepare()
    except CycleError as error:
        way: list[str] = error.args[1]  # each node is read by the next one; the last is the first
        node = workflow.node(way[1])
        edge = next(edge for edge in node.inputs if edge.source == way[0])
        raise _fail(workflow, node, f"a cycle: {' -> '.join(way)}", edge) from error


# ---------------------------------------------------------------------------------------------------- one node


def _check_node(workflow: Workflow, node: Node) -> None:
    if node.op not in OPS:
        raise _fail(workflow, node, f"there is no op {node.op}")
    connected = Counter(edge.input for edge in node.inputs)
    for port in OPS[node.op].inputs:
        if not port.is_optional and not connected[port.name]:
            raise WorkflowError(
                f"workflow {workflow.name}, node {node.name}: its input {port.name} is not connected",
                node=node.name,
                input=port.name,
            )
    for name, times in connected.items():
        if times > 1:
            edge = next(edge for edge in node.inputs if edge.input == name)
            raise _fail(workflow, node, "it is connected more than once", edge)
    _check_role(workflow, node)
    _check_literals(workflow, node)
    if node.shows:
        _check_side(workflow, node)
    if node.chooses:
        _check_chooser(workflow, node)


def _check_role(workflow: Workflow, node: Node) -> None:
    """One model plays a role, by its components of one kind."""
    kind = OPS[node.op].component
    first = next(other for other in workflow.nodes if other.op in OPS and role_of(other) == role_of(node))
    if OPS[first.op].component != kind:
        role = f"its role {role_of(node)} is played by a {kind}"
        raise _fail(workflow, node, f"{role}, and that of {first.name} by a {OPS[first.op].component}")


def _check_literals(workflow: Workflow, node: Node) -> None:
    for name in node.literals:
        if name not in OPS[node.op].literals:
            raise _fail(workflow, node, f"op {node.op} takes no literal {name}")
    if node.canvas and node.canvas not in workflow.canvases:
        raise _fail(workflow, node, f"the workflow has no canvas {node.canvas}")


def _check_side(workflow: Workflow, node: Node) -> None:
    """A side node runs after some rounds of a node, and no node reads what it makes."""
    if node.region or not any(each.name == node.shows and each.region for each in workflow.nodes):
        raise _fail(workflow, node, f"a side node shows a node that repeats, which {node.shows} is not")
    if readers_of(workflow, node.name):
        raise _fail(workflow, node, "no node can read what a side node makes")


def _check_chooser(workflow: Workflow, node: Node) -> None:
    if node.region or node.shows:
        raise _fail(workflow, node, "a node that runs several times cannot choose a reader")
    if len(readers_of(workflow, node.name)) < 2:
        raise _fail(workflow, node, "a node that chooses needs two readers")


# ---------------------------------------------------------------------------------------------------- one edge


def _check_edge(workflow: Workflow, node: Node, edge: Edge) -> None:
    source = workflow.node(edge.source)
    made = _port(workflow, node, edge, OPS[source.op].outputs if source.op in OPS else (), f"{edge.source} makes no")
    read = _find(OPS[node.op].inputs, edge.input)
    if read is None:
        raise _fail(workflow, node, f"op {node.op} has no input {edge.input}", edge)
    if made.type != read.type:
        raise _fail(workflow, node, f"it takes {read.type}, and {edge.source}.{edge.name} is {made.type}", edge)
    if edge.carried:
        _check_carried(workflow, node, edge, made)
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


def _check_carried(workflow: Workflow, node: Node, edge: Edge, made: Port) -> None:
    by = next((each for each in workflow.nodes if each.name == edge.carried), None)
    if by is None or not node.region or by.region != node.region:
        raise _fail(workflow, node, f"it is carried by {edge.carried}, which is no node of its region", edge)
    if workflow.node(edge.source).region == node.region:
        raise _fail(
            workflow, node, f"the first value comes from outside of the region, and {edge.source} is in it", edge
        )
    if edge.deferred:
        raise _fail(workflow, node, "what is carried from round to round cannot be deferred", edge)
    port = _port(workflow, node, edge, OPS[by.op].outputs if by.op in OPS else (), f"{by.name} makes no")
    if port.type != made.type:
        raise _fail(workflow, node, f"{by.name}.{edge.name} is {port.type}, and the first one {made.type}", edge)


def _port(workflow: Workflow, node: Node, edge: Edge, ports: tuple[Port, ...], problem: str) -> Port:
    port = _find(ports, edge.name)
    if port is None:
        raise _fail(workflow, node, f"{problem} {edge.name}", edge)
    return port


def _find(ports: tuple[Port, ...], name: str) -> Port | None:
    return next((port for port in ports if port.name == name), None)


# ---------------------------------------------------------------------------------------------------- the whole


def _check_regions(workflow: Workflow) -> None:
    declared = [region.name for region in workflow.regions]
    for node in workflow.nodes:
        if node.region and node.region not in declared:
            raise _fail(workflow, node, f"there is no region {node.region}")
    for name in declared:
        nodes = [node for node in workflow.nodes if node.region == name]
        if not nodes:
            raise WorkflowError(f"workflow {workflow.name}: region {name} has no nodes", node=name)
        if not any(edge.carried for node in nodes for edge in node.inputs):
            raise _fail(workflow, nodes[0], f"region {name} carries nothing from one round to the next")


def _check_outputs(workflow: Workflow) -> None:
    if not workflow.outputs:
        raise WorkflowError(f"workflow {workflow.name} has no output", node="")
    for name, maker in workflow.outputs.items():
        node = next((node for node in workflow.nodes if node.name == maker), None)
        if node is None:
            raise WorkflowError(f"workflow {workflow.name}, output {name}: there is no node {maker}", node=maker)
        if node.region or node.shows:
            raise _fail(workflow, node, "an output must run once")
        choices = may_skip(workflow, maker)
        if choices is not None:
            how = " and ".join(f"{chooser} chooses {reader}" for chooser, reader in choices.items())
            raise _fail(workflow, node, f"the output is skipped if {how}")
