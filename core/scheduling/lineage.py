"""Lineage: which nodes have to run again to make lost values once more. A pure query; nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from core.graph.progress import Progress
from core.handles import TensorKey
from core.scheduling.value_keys import keys_read


@dataclass(frozen=True, slots=True)
class Invocation:
    """One run of a node."""

    node: str
    round_: int  # of a node that repeats, from 0; else 0


def invocations_to_repeat(
    request_id: str, progress: Progress, wanted: Iterable[TensorKey], has: Callable[[TensorKey], bool]
) -> list[Invocation]:
    """The invocations that make all `wanted` values of a request, each after those whose values it reads: producers,
    and recursively theirs, back to what survives. has: whether a value survives.
    """
    found: dict[Invocation, None] = {}
    workflow = progress.workflow
    stack = [(_producer(progress, key), False) for key in wanted if not has(key)]
    while stack:
        invocation, are_inputs_done = stack.pop()
        if invocation in found:
            continue
        if are_inputs_done:
            found[invocation] = None
            continue
        stack.append((invocation, True))
        inputs = keys_read(request_id, progress, workflow.node(invocation.node), invocation.round_)
        lost = (key for key in inputs if not has(key))
        stack += [(_producer(progress, key), False) for key in lost]
    return list(found)


def _producer(progress: Progress, key: TensorKey) -> Invocation:
    """The invocation that makes a value. Round v - 1 makes version v."""
    repeats = bool(progress.workflow.node(key.node).region)
    return Invocation(key.node, key.version - 1 if repeats else 0)
