"""Lineage: finds the runs of nodes that have to be repeated to make lost values again. It changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from core.graph.progress import Progress
from core.graph.workflow import Node, Workflow, outputs_of
from core.handles import TensorKey
from core.scheduling.values.value_keys import keys_read

Has = Callable[[TensorKey], bool]
"""Whether a value is there."""


def runs_to_keep(request_id: str, progress: Progress, lost: Iterable[TensorKey], has: Has) -> dict[str, int]:
    """Node -> how many of its runs still count as done, for the nodes that must run again to make all `lost` values of
    a request. These are the producers of the lost values and, recursively, the producers of the inputs that these need
    and that are gone. All later runs of these nodes are repeated, too, because each round needs the one before.
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
    """The index of the run that makes a value. Run v - 1 makes version v."""
    return key.version - 1 if node.region else 0


def _missing(keys: Iterable[TensorKey], workflow: Workflow, has: Has) -> Iterator[TensorKey]:
    """The inputs of one run that must be made again. Nobody knows whether an optional value was ever made, so it counts
    as there if everything else is there that its producer made in the same run for the same reader.
    """
    by_run: dict[tuple[str, int], list[TensorKey]] = {}
    for key in keys:
        by_run.setdefault((key.node, key.version), []).append(key)
    for made in by_run.values():
        certain = [key for key in made if not _is_optional(workflow, key)]
        yield from (key for key in certain or made if not has(key))


def _is_optional(workflow: Workflow, key: TensorKey) -> bool:
    return any(port.name == key.name and port.is_optional for port in outputs_of(workflow.node(key.node)))
