"""Halving: retries a batch that failed as a whole in smaller parts, so that only the item at fault fails.

The worker does this within the batch's one result, which gives the number of parts. The scheduler could form smaller
batches itself, but would then have to undo the failed step in the progress of all requests, which is impossible once a
later plan of the same request is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.failure import Failure
from core.messages.worker import Item, ItemResult

Attempt = Callable[[Sequence[Item]], list[ItemResult] | Failure]
"""Computes items together. After a Failure no item has changed any state."""


def attempt_in_halves(
    items: Sequence[Item], attempt: Attempt, recover: Callable[[], None]
) -> tuple[list[ItemResult], int]:
    """A result for every item, in their order, and the number of parts that succeeded or failed for good.

    A failed part is retried in halves, down to single items. A single item fails for good, after running out of memory
    only the second time. `recover` is called before another attempt after running out of memory. One bad item of n is
    found in 2 log2(n) + 1 attempts; if all are bad, each item has been in at most log2(n) + 3.
    """
    outcome = attempt(items)
    if isinstance(outcome, Failure) and len(items) == 1 and outcome.kind == "out_of_memory":
        recover()
        outcome = attempt(items)
    if not isinstance(outcome, Failure):
        return outcome, 1
    if len(items) == 1:
        return [ItemResult(items[0].request_id, items[0].node, failure=outcome)], 1
    if outcome.kind == "out_of_memory":
        recover()
    middle = len(items) // 2
    (first, first_parts), (rest, rest_parts) = (
        attempt_in_halves(half, attempt, recover) for half in (items[:middle], items[middle:])
    )
    return first + rest, first_parts + rest_parts
