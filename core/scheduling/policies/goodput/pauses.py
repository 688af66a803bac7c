"""Pauses: how much longer ranks take for work than it takes to compute it."""

from __future__ import annotations

from core.messages.worker import Batch, BatchResult

FORGET = 0.98
"""Weight of what was observed before, after each new observation, as for profiles."""


class Pauses:
    """Of one policy. Between two batches a result and a plan travel, unless the second was sent ahead."""

    def __init__(self) -> None:
        self.stretch = 1.0
        """Time from the end of a batch to the end of the next one, as a multiple of the next one's own."""
        self._last: dict[int, tuple[float, frozenset[str]]] = {}  # rank -> (end of its last batch, requests in it)

    def note(self, batch: Batch, result: BatchResult) -> None:
        """Note a batch that has ended. It counts if it follows one with a request of its own, which therefore waited
        for nothing else; a pause that is longer than the batch is none of these.
        """
        rank, requests = batch.ranks[0], frozenset(item.request_id for item in batch.items)
        ended, before = self._last.get(rank, (0.0, frozenset()))
        pause = max(0.0, result.started - ended)
        if not requests.isdisjoint(before) and pause < result.seconds:
            self.stretch = FORGET * self.stretch + (1 - FORGET) * (1 + pause / result.seconds)
        self._last[rank] = result.started + result.seconds, requests
