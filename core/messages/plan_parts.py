"""Splits a plan into the parts of its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TypeVar

from core.messages.worker import StepPlan

T = TypeVar("T")


def parts_of(plan: StepPlan) -> dict[int, StepPlan]:
    """Rank -> its part of a plan, ascending, for ranks that have one. Files to delete go to the plan's file rank, a
    batch to each of its ranks, and all else to the ranks that it names. Costs by the size of the parts.
    """
    batches = _by_rank((rank, batch) for batch in plan.batches for rank in batch.ranks)
    transfers = _by_rank((transfer.source, transfer) for transfer in plan.transfers)
    deliveries = _by_rank((delivery.source, delivery) for delivery in plan.deliveries)
    frees = _by_rank((rank, free) for free in plan.free for rank in free.ranks)
    forgets = _by_rank((forget.rank, forget) for forget in plan.forget)
    copies = _by_rank((copy.rank, copy) for copy in plan.copies)
    loads = _by_rank((rank, load) for load in plan.loads for rank in load.ranks)
    ranks = set(chain(batches, transfers, deliveries, frees, forgets, copies, loads))
    if plan.delete:
        ranks.add(plan.file_rank)
    return {
        rank: StepPlan(
            seq=plan.seq,
            forget=tuple(forgets.get(rank, ())),
            delete=plan.delete if rank == plan.file_rank else (),
            copies=tuple(copies.get(rank, ())),
            batches=tuple(batches.get(rank, ())),
            transfers=tuple(transfers.get(rank, ())),
            deliveries=tuple(deliveries.get(rank, ())),
            free=tuple(frees.get(rank, ())),
            loads=tuple(loads.get(rank, ())),
        )
        for rank in sorted(ranks)
    }


def _by_rank(pairs: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    found: dict[int, list[T]] = {}
    for rank, each in pairs:
        found.setdefault(rank, []).append(each)
    return found
