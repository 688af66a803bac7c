"""Pauses: how much time ranks lose between batches."""

from __future__ import annotations

from core.messages.worker import Batch, BatchResult

FORGET = 0.98
"""Weight of earlier observations after each new one, as for profiles."""


class Pauses:
    """The pauses that one policy sees. Between two batches a result and a plan travel, unless the second batch was sent
    ahead.
    """

    def __init__(self) -> None:
        self.stretch = 1.0
        """Time from the end of one batch to the end of the next, as a multiple of the next one's computing time."""
        self._last: dict[int, tuple[float, frozenset[str]]] = {}  # rank -> (end of its last batch, requests in it)

    def note(self, batch: Batch, result: BatchResult) -> None:
        """Note a batch that has ended. It counts only if it shares a request with the batch before, because that
        request waited for nothing else. A pause longer than the batch has another cause and does not count.
        """
        rank, requests = batch.ranks[0], frozenset(item.request_id for item in batch.items)
        ended, before = self._last.get(rank, (0.0, frozenset()))
        pause = max(0.0, result.started - ended)
        if not requests.isdisjoint(before) and pause < result.seconds:
            self.stretch = FORGET * self.stretch + (1 - FORGET) * (1 + pause / result.seconds)
        self._last[rank] = result.started + result.seconds, requests
