"""Computes the keys of the values that a node reads, and how often a value is read.

Round v (from 1) of a node that repeats makes version v of its values. All other values have version 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.graph.progress import Progress
from core.graph.workflow import Edge, Node
from core.handles import TensorKey


def key_read(request_id: str, progress: Progress, node: Node, edge: Edge, round_: int) -> TensorKey:
    """Key of the value that a node reads through one of its edges. round_: see `Progress.round_of`."""
    if edge.carried and round_:
        return TensorKey(request_id, edge.carried, edge.name, round_)
    return TensorKey(request_id, edge.source, edge.name, _version(progress, node, edge, round_))


def edges_read(progress: Progress, edges: Iterable[Edge]) -> list[Edge]:
    """The edges through which a node gets a value: edges from skipped nodes are left out."""
    return [edge for edge in edges if edge.source not in progress.skipped] if progress.skipped else list(edges)


def keys_read(request_id: str, progress: Progress, node: Node, round_: int) -> list[TensorKey]:
    """Keys of all values that a node reads in this round."""
    edges = edges_read(progress, node.inputs)
    return list(dict.fromkeys(key_read(request_id, progress, node, edge, round_) for edge in edges))


def keys_done(request_id: str, progress: Progress, node: Node, round_: int) -> list[TensorKey]:
    """Keys of the values that a node has read for the last time in the run that is finished now."""
    reads = progress.workflow.reads[node.name]
    if round_ and reads.carried and node.name not in progress.over:  # a loop's usual round
        return [TensorKey(request_id, source, name, round_) for source, name in reads.carried]
    keys = [key_read(request_id, progress, node, edge, round_) for edge in edges_read(progress, reads.of_round)]
    if node.name not in progress.over and not reads.overlap:
        return list(dict.fromkeys(keys))
    fixed = [key_read(request_id, progress, node, edge, round_) for edge in edges_read(progress, reads.fixed)]
    if node.name in progress.over:
        return list(dict.fromkeys(keys + fixed))
    return list(dict.fromkeys(key for key in keys if key not in fixed))


def num_reads(progress: Progress, node: Node, name: str, version: int) -> int:
    """How often other nodes will read a value of a node. A reader counts once, or twice if it reads the value in the
    round that made it and in the next round.
    """
    if node.region and version < progress.rounds[node.region] and not progress.was_rewound:
        return progress.workflow.reads_in_rounds.get((node.name, name), 0) + _num_shown(progress, node, name, version)
    number = 0
    for reader, edges in progress.workflow.readers.get((node.name, name), ()):
        if reader.name not in progress.over:
            number += len({way for edge in edges if (way := _way(progress, reader, node, edge, version))})
    return number


def _num_shown(progress: Progress, node: Node, name: str, version: int) -> int:
    """How many side nodes will read a value of this version."""
    if not progress.pending:
        return 0
    sides = (side for side in progress.workflow.sides.get(node.name, ()) if side.name in progress.pending)
    read = node.name, name
    return sum(
        progress.round_of(side) == version and any((e.source, e.name) == read for e in side.inputs) for side in sides
    )


def _way(progress: Progress, reader: Node, node: Node, edge: Edge, version: int) -> str:
    """The kind of coming run in which a node reads a value through an edge; "": it reads it in none."""
    is_last = not node.region or version == progress.rounds[node.region]
    if edge.carried == node.name and version:
        return "" if is_last or progress.done[reader.name] > version else "next round"
    if edge.source != node.name or (edge.carried and progress.done[reader.name]):
        return ""
    if reader.shows == node.name:
        return "shown" if version in progress.shown.get(reader.name, ())[progress.done[reader.name] :] else ""
    if reader.region and reader.region == node.region:
        return "same round" if progress.done[reader.name] < version else ""
    return "any" if is_last else ""


def _version(progress: Progress, node: Node, edge: Edge, round_: int) -> int:
    source = progress.workflow.node(edge.source)
    if edge.source == node.shows:
        return round_
    if not source.region:
        return 0
    return round_ + 1 if source.region == node.region else progress.rounds[source.region]
