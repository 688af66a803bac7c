"""Lineage: which runs of which nodes have to be repeated to make lost values once more. A pure query; nothing is
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from core.graph.op import OPS
from core.graph.progress import Progress
from core.graph.workflow import Node, Workflow
from core.handles import TensorKey
from core.scheduling.values.value_keys import keys_read

Has = Callable[[TensorKey], bool]
"""Whether a value is there."""


def runs_to_keep(request_id: str, progress: Progress, lost: Iterable[TensorKey], has: Has) -> dict[str, int]:
    """Node -> how many of its runs count as done still, of the nodes that must run again to make all `lost` values of a
    request: their producers, and recursively the producers of what these read, back to what is there. All later runs of
    these nodes are repeated, too, as each round needs the one before.
    """
    kept: dict[str, int] = {}
    missing = list(lost)
    while missing:
        key = missing.pop()
        node = progress.workflow.node(key.node)
        first, before = _run_of(node, key), kept.get(node.name, progress.done[node.name])
        if first < before:
            kept[node.name] = first
            for round_ in range(first, before):
                missing += _missing(keys_read(request_id, progress, node, round_), progress.workflow, has)
    return kept


def _run_of(node: Node, key: TensorKey) -> int:
    """The run of a node that makes a value, from 0. Round v - 1 makes version v."""
    return key.version - 1 if node.region else 0


def _missing(keys: Iterable[TensorKey], workflow: Workflow, has: Has) -> Iterator[TensorKey]:
    """What must be made again of what one run reads. Of an optional value it is not known whether it was ever made, so
    it counts as there if all is that its producer made at the same time for the same reader.
    """
    by_run: dict[tuple[str, int], list[TensorKey]] = {}
    for key in keys:
        by_run.setdefault((key.node, key.version), []).append(key)
    for made in by_run.values():
        certain = [key for key in made if not _is_optional(workflow, key)]
        yield from (key for key in certain or made if not has(key))


def _is_optional(workflow: Workflow, key: TensorKey) -> bool:
    return any(port.name == key.name and port.is_optional for port in OPS[workflow.node(key.node).op].outputs)
