"""Lineage: which nodes have to run again to make lost values once more. A pure query; nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from core.graph.workflow import Workflow
from core.handles import TensorKey
from core.scheduling.value_keys import keys_read


@dataclass(frozen=True, slots=True)
class Invocation:
    """One run of a node."""

    node: str
    rounds: int  # of the loop that are done before it, see `keys_read`


def invocations_to_repeat(
    request_id: str, workflow: Workflow, num_rounds: int, wanted: Iterable[TensorKey], has: Callable[[TensorKey], bool]
) -> list[Invocation]:
    """The invocations that make all `wanted` values of a request, each after those whose values it reads: producers,
    and recursively theirs, back to what survives. num_rounds: of the loop in all. has: whether a value survives.
    """
    found: dict[Invocation, None] = {}
    stack = [(_producer(workflow, num_rounds, key), False) for key in wanted if not has(key)]
    while stack:
        invocation, are_inputs_done = stack.pop()
        if invocation in found:
            continue
        if are_inputs_done:
            found[invocation] = None
            continue
        stack.append((invocation, True))
        inputs = keys_read(request_id, workflow, workflow.node(invocation.node), invocation.rounds)
        lost = (key for key in inputs if not has(key))
        stack += [(_producer(workflow, num_rounds, key), False) for key in lost]
    return list(found)


def _producer(workflow: Workflow, num_rounds: int, key: TensorKey) -> Invocation:
    """The invocation that makes a value. Round v makes version v."""
    is_round = workflow.node(key.node).kind == "loop"
    return Invocation(key.node, key.version - 1 if is_round else num_rounds)
