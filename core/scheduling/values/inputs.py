"""Finds the inputs of a node, as seen from the ranks that are to run it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from core.graph.workflow import Edge, Node, op_of
from core.handles import RankIds, TensorKey, TensorRef
from core.messages.worker import Batch, Delivery, Item
from core.scheduling.requests.request import Request
from core.scheduling.values.value_keys import edges_read, key_read
from core.scheduling.values.values import ValueTable


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a node's next run."""

    awaited: tuple[TensorKey, ...] = ()  # values that are on their way, or that other ranks are still to make
    elsewhere: tuple[TensorKey, ...] = ()  # values that only other ranks have, and that are not in shared memory
    # The ranks that can send all of these while the node waits for them; None: some are nowhere yet.
    senders: frozenset[int] | None = frozenset()

    @property
    def are_there(self) -> bool:
        """Whether the ranks can read all inputs once they have done the batches that they were sent."""
        return not self.awaited and not self.elsewhere


_ALL_THERE = Inputs()


def find_inputs(request: Request, node: Node, ranks: RankIds, values: ValueTable) -> Inputs:
    """The inputs that these ranks need when they start a ready node, by where they are."""
    if _is_at_home(request, ranks):
        return _ALL_THERE
    reads = request.workflow.reads[node.name]
    is_fixed_there = (node.name, ranks) in request.fixed_inputs  # since an earlier round
    edges = edges_read(request.progress, reads.of_round if is_fixed_there else node.inputs)
    edges = [edge for edge in edges if not edge.deferred]
    round_ = request.progress.round_of(node)
    awaited, elsewhere, holders = list[TensorKey](), list[TensorKey](), list[Collection[int]]()
    for key in {key_read(request.id, request.progress, node, edge, round_) for edge in edges}:
        value = values.get(key)
        if value is None:
            makers = request.sent_to.get((key.node, key.version), ())
            if not _is_made(request, key) and not set(ranks) <= set(makers):
                awaited.append(key)
                holders.append(makers)
        elif not value.ranks.issuperset(ranks) and value.exported is None:
            (awaited if value.is_moving else elsewhere).append(key)
            holders.append(value.ranks)
    senders = frozenset(map(_sender, holders)) if all(holders) else None
    return Inputs(tuple(awaited), tuple(elsewhere), senders)


def _sender(holders: Iterable[int]) -> int:
    """Which of the ranks that have a value, or will have it, sends it to another. holders: at least one."""
    return min(holders)


def _is_at_home(request: Request, ranks: RankIds) -> bool:
    """Whether all values of the request are on this one rank."""
    used = request.ranks
    return len(ranks) == 1 and not request.has_lost_rank and (not used or (len(used) == 1 and ranks[0] in used))


def _is_made(request: Request, key: TensorKey) -> bool:
    """Whether the run that makes a value is done. If the value is not there then, the run has made none: a sampler may
    have no state.
    """
    return request.progress.done[key.node] >= max(1, key.version)


def is_ahead(request: Request, item: Item) -> bool:
    """Whether an answered item has read from a run that is not answered yet, or follows one. False for a request that
    has ended or whose runs in flight do not count: an earlier run of it may never be answered.
    """
    if len(request.ranks) < 2 or not request.is_live or request.is_set_back:
        return False
    progress = request.progress
    if item.version > progress.done[item.node] + 1:
        return True
    if len(progress.in_flight) == 1:  # only this item's node is in flight
        return False
    return any(ref.key.node in progress.in_flight and not _is_made(request, ref.key) for ref in item.inputs)


# ---------------------------------------------------------------------------------------------------- what is sent


def input_refs(request: Request, node: Node, ranks: RankIds, values: ValueTable) -> tuple[TensorRef, ...]:
    """References to the inputs of a node's next run on these ranks, for its message."""
    reads, round_ = request.workflow.reads[node.name], request.progress.round_of(node)
    fixed = request.fixed_inputs.get((node.name, ranks))
    if fixed is None:  # made once, because all rounds read the same values
        fixed = _refs(request, node, reads.fixed, round_, ranks, values)
        if not any(ref.is_deferred for ref in fixed):
            request.fixed_inputs[node.name, ranks] = fixed
    return fixed + _refs(request, node, reads.of_round, round_, ranks, values)


def deliveries(batch: Batch) -> list[Delivery]:
    """Values that other ranks have to send to the ranks of a batch while it runs."""
    refs = [ref for item in batch.items for ref in item.inputs if ref.is_deferred]
    return [Delivery(ref.key, ref.rank, rank) for ref in refs for rank in batch.ranks if rank != ref.rank]


def _refs(
    request: Request, node: Node, edges: Sequence[Edge], round_: int, ranks: RankIds, values: ValueTable
) -> tuple[TensorRef, ...]:
    edges = edges_read(request.progress, edges)
    if _is_at_home(request, ranks):
        progress, rank = request.progress, ranks[0]
        return tuple(TensorRef(key_read(request.id, progress, node, e, round_), rank, port=e.port) for e in edges)
    return tuple(_ref(request, node, edge, round_, ranks, values) for edge in edges)


def _ref(request: Request, node: Node, edge: Edge, round_: int, ranks: RankIds, values: ValueTable) -> TensorRef:
    """Reference to a value that the ranks have, that an earlier batch of theirs will make, that is in shared memory, or
    that another rank sends while the node runs, or waits for it. The producer may turn out to make none: a sampler may
    have no state.
    """
    key = key_read(request.id, request.progress, node, edge, round_)
    value = values.get(key)
    holders = request.sent_to.get((key.node, key.version), ranks) if value is None else value.ranks
    if set(ranks) <= set(holders):
        return TensorRef(key, ranks[0], port=edge.port)
    if value is not None and value.exported is not None:
        return msgspec.structs.replace(value.ref, handle=value.exported, port=edge.port)
    if edge.deferred or op_of(node).serves_step:
        return TensorRef(key, _sender(holders), port=edge.port, is_deferred=True)
    raise AssertionError(f"{node.name} of {request.id} cannot read {key} on {ranks}")
