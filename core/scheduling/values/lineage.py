"""Lineage: finds the runs of nodes that have to be repeated to make lost values again. It changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

from core.graph.progress import Progress
from core.graph.workflow import Node, Workflow, outputs_of
from core.handles import TensorKey
from core.scheduling.values.value_keys import keys_read

Has = Callable[[TensorKey], bool]
"""Whether a value is there."""

Made = Set[tuple[str, str]]
"""(node, output) of the optional outputs that were made: a node makes such an output in all of its runs or in none."""


def runs_to_keep(
    request_id: str, progress: Progress, lost: Iterable[TensorKey], has: Has, made: Made
) -> dict[str, int]:
    """Node -> how many of its runs still count as done, for the nodes that must run again to make all `lost` values of
    a request. These are the producers of the lost values and, recursively, the producers of the inputs that these need
    and that are gone. All later runs of these nodes are repeated, too, because each round needs the one before.
    """
    kept: dict[str, int] = {}
    missing = list(lost)
    while missing:
        key = missing.pop()
        node = progress.workflow.node(key.node)
        first, before = _run_of(progress, node, key), kept.get(node.name, progress.done[node.name])
        if first < before:
            kept[node.name] = first
            for run in range(first, before):
                round_ = progress.shown[node.name][run] if node.shows else run
                keys = keys_read(request_id, progress, node, round_)
                missing += [key for key in keys if not has(key) and _was_made(key, progress.workflow, made)]
    return kept


def _run_of(progress: Progress, node: Node, key: TensorKey) -> int:
    """The index of the run that made a value. Run v - 1 makes version v, and a side node's last one what is there."""
    if node.shows:
        return progress.done[node.name] - 1
    return key.version - 1 if node.region else 0


def _was_made(key: TensorKey, workflow: Workflow, made: Made) -> bool:
    outputs = outputs_of(workflow.node(key.node))
    is_optional = any(port.name == key.name and port.is_optional for port in outputs)
    return not is_optional or (key.node, key.name) in made
