"""Reads a ComfyUI graph in the form of its API: {"3": {"class_type": "KSampler", "inputs": {...}}, ...}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from core.errors import WorkflowError
from core.validation import shorten
from entrypoints.workflows.comfy.graph import Graph, Node, Source, shown
from entrypoints.workflows.comfy.input_kind import Link, Widget
from entrypoints.workflows.comfy.node_class import NODE_CLASSES, NodeClass

MAX_NODES = 500
"""Most nodes of a graph."""

MAX_SIGNS = 50_000
"""Most commas and opening brackets of a graph's JSON, those in texts among them: each value but the first has one
before it. While values are read, nothing else of this process runs, 0.3 ms for a thousand."""

MAX_ID = 64
"""Most characters of a node's id."""


def read_graph(text: str) -> Graph:
    """The graph of a JSON text. Raises WorkflowError that names the node by its id and class, and the input."""
    members = _members(text)
    nodes = {id_: _node(id_, member) for id_, member in members.items()}
    links = {id_: _links(node, members[id_]["inputs"], nodes) for id_, node in nodes.items()}
    made = dict[str, Node]()
    for id_ in _order(nodes, links):
        node = nodes[id_]
        read = {name: Source(made[source], output) for name, (source, output) in links[id_].items()}
        made[id_] = Node(id_, node.kind, node.values, read)
    return Graph(made)


def _members(text: str) -> Mapping[str, Any]:
    if sum(map(text.count, ",[{")) > MAX_SIGNS:
        raise _broken(f"it has more than {MAX_SIGNS} values, or signs of such in its texts")
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _broken(f"it is no JSON: {shorten(str(error))}") from error
    if isinstance(read, dict) and isinstance(read.get("prompt"), dict):
        read = read["prompt"]  # as clients send it
    if not isinstance(read, dict) or not read:
        raise _broken("it is no graph: an object with a member for each node is wanted")
    if isinstance(read.get("nodes"), list):
        raise _broken("it is a graph as ComfyUI's pages save it; export it in the form of the API")
    if len(read) > MAX_NODES:
        raise _broken(f"it has {len(read)} nodes, and may have {MAX_NODES}")
    return read


def _broken(problem: str) -> WorkflowError:
    return WorkflowError(problem, node="")


def _node(id_: str, member: object) -> Node:
    """A node without its links."""
    kind = member.get("class_type") if isinstance(member, dict) else None
    node = Node(id_, kind if isinstance(kind, str) else "?")
    if len(id_) > MAX_ID or not id_.isprintable():
        raise node.error(f"an id has at most {MAX_ID} characters, all of them printable")
    if not isinstance(member, dict) or not isinstance(kind, str) or not isinstance(member.get("inputs"), dict):
        raise node.error("a node is an object with class_type, a text, and inputs, an object")
    known = NODE_CLASSES.get(kind)
    if known is None:
        raise node.error("nothing here does what this class does")
    inputs = member["inputs"]
    if unknown := [name for name in inputs if name not in known.inputs]:
        raise node.error(f"it has no such input; there are {', '.join(known.inputs)}", unknown[0])
    values = {name: value for name, value in inputs.items() if isinstance(known.inputs[name], Widget)}
    for name, input_kind in known.inputs.items():
        if name not in inputs and not _may_lack(known, name):
            raise node.error("it is not given", name)
        if isinstance(input_kind, Widget) and name in values and (problem := input_kind.problem(values[name])):
            raise node.error(problem, name)
    return Node(id_, kind, values)


def _may_lack(known: NodeClass, name: str) -> bool:
    kind = known.inputs[name]
    return kind.is_optional if isinstance(kind, Link) else name in known.optional


def _links(node: Node, inputs: Mapping[str, Any], nodes: Mapping[str, Node]) -> dict[str, tuple[str, int]]:
    """Input -> (node, output) that it reads."""
    return {name: _link(node, name, inputs[name], nodes) for name in inputs if name not in node.values}


def _link(node: Node, name: str, value: object, nodes: Mapping[str, Node]) -> tuple[str, int]:
    """What an input reads."""
    wanted = NODE_CLASSES[node.kind].inputs[name]
    assert isinstance(wanted, Link)
    match value:
        case [str(source), int(output)] if not isinstance(output, bool):
            pass
        case _:
            raise node.error(f"an output of another node is wanted, [id, number], of type {wanted.type}", name)
    if source not in nodes:
        raise node.error(f"there is no node {shown(source)}", name)
    outputs = NODE_CLASSES[nodes[source].kind].outputs
    if not 0 <= output < len(outputs):
        has = f"node {shown(source)} ({nodes[source].kind}) has {len(outputs)} outputs"
        raise node.error(f"{has}, numbered from 0, and {shorten(f'{output!r:.40}')} is none", name)
    if outputs[output] != wanted.type:
        made = f"output {output} of node {shown(source)} ({nodes[source].kind}) is {outputs[output]}"
        raise node.error(f"{made}, and {wanted.type} is wanted", name)
    return source, output


def _order(nodes: Mapping[str, Node], links: Mapping[str, Mapping[str, tuple[str, int]]]) -> list[str]:
    sources = {id_: [source for source, _ in read.values()] for id_, read in links.items()}
    try:
        return list(TopologicalSorter(sources).static_order())
    except CycleError as error:
        way: list[str] = error.args[1]
        node = nodes[way[1]]
        name = next(name for name, (source, _) in links[node.id].items() if source == way[0])
        raise node.error(f"a cycle: {shown(' -> '.join(way))}", name) from error
