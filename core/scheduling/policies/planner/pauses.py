"""Pauses: how much time ranks lose between batches."""

from __future__ import annotations

from typing import NamedTuple

from core.messages.worker import Batch, BatchResult

FORGET = 0.98
"""Weight of earlier observations after each new one, as for profiles."""


class _Last(NamedTuple):
    """The last batch of a rank."""

    id: int
    end: float
    requests: frozenset[str]  # without those that were in a batch of other ranks since


class Pauses:
    """The pauses that one policy sees. Between two batches a result and a plan travel, unless the second batch was sent
    ahead.
    """

    def __init__(self) -> None:
        self.stretch = 1.0
        """Time from the end of one batch to the end of the next, as a multiple of the next one's computing time."""
        self._last: dict[int, _Last] = {}  # by rank

    def note(self, batch: Batch, result: BatchResult) -> None:
        """Note a batch that has ended. It counts only if its ranks' last batch was the same and had one of its
        requests, which waited for nothing else. A pause longer than the batch has another cause and does not count.
        """
        requests, ranks = frozenset(item.request_id for item in batch.items), batch.ranks
        last, *others = {self._last.get(rank) for rank in ranks}
        if last is not None and not others and not requests.isdisjoint(last.requests):
            pause = max(0.0, result.started - last.end)
            if pause < result.seconds:
                self.stretch = FORGET * self.stretch + (1 - FORGET) * (1 + pause / result.seconds)
        for rank, each in self._last.items():
            if not requests.isdisjoint(each.requests):
                self._last[rank] = each._replace(requests=each.requests - requests)
        self._last |= dict.fromkeys(ranks, _Last(batch.id, result.started + result.seconds, requests))
