"""Halving: how a batch that failed as a whole gets done all the same, but for the item at fault.

The worker does it at once, within the batch's one result, and the scheduler is told how many parts there were. It could
as well form smaller batches itself, but then a failed step would have to be taken back in everybody's progress, which
cannot be done once a later plan of the same request is out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.failure import Failure
from core.messages.worker import Item, ItemResult

Attempt = Callable[[Sequence[Item]], list[ItemResult] | Failure]
"""Computes items together. A Failure: it left no trace of any of them."""


def attempt_in_halves(
    items: Sequence[Item], attempt: Attempt, recover: Callable[[], None]
) -> tuple[list[ItemResult], int]:
    """A result for every item, in their order, and the number of parts that were done or given up.

    What fails together is tried in halves, until an item is alone: that one fails, and if it was for want of memory,
    only when it does so twice. `recover` is called after every failure that is followed by another attempt. Of n items,
    one at fault is found in 2 log2(n) + 1 attempts; if all are, every one has been in at most log2(n) + 3.
    """
    outcome = attempt(items)
    if isinstance(outcome, Failure) and len(items) == 1 and outcome.kind == "out_of_memory":
        recover()
        outcome = attempt(items)
    if not isinstance(outcome, Failure):
        return outcome, 1
    if len(items) == 1:
        return [ItemResult(items[0].request_id, items[0].node, failure=outcome)], 1
    recover()
    middle = len(items) // 2
    (first, first_parts), (rest, rest_parts) = (
        attempt_in_halves(half, attempt, recover) for half in (items[:middle], items[middle:])
    )
    return first + rest, first_parts + rest_parts
