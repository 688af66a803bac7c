"""Slowness: how much longer steps take than predicted, with the pauses before them."""

from __future__ import annotations

from typing import NamedTuple

from core.messages.worker import BatchResult
from core.scheduling.ranks.in_flight import Flight

FORGET = 0.98
"""Weight of earlier observations after each new one, as for profiles."""

MOST = 2.0
"""A step that takes longer than this multiple of its prediction has another cause, and counts as this multiple."""


class _Last(NamedTuple):
    """The last batch of a rank."""

    id: int
    end: float
    requests: frozenset[str]  # without those that were in a batch of other ranks since


class Slowness:
    """Between two batches a result and a plan travel, unless the second batch was sent ahead; and while other ranks are
    busy, batches take longer than on average.
    """

    def __init__(self) -> None:
        self.value = 1.0
        """Time from the end of a batch to the end of the step after it, as a multiple of that one's predicted time."""
        self._last: dict[int, _Last] = {}  # by rank

    def note(self, flight: Flight, result: BatchResult, *, is_usual: bool) -> None:
        """Note a batch that has ended. A step counts only if its ranks' last batch was the same and had one of its
        requests, which waited for nothing else. A pause longer than the step has another cause and does not count.
        is_usual: whether it trains the cost model.
        """
        batch = flight.batch
        requests, ranks = frozenset(item.request_id for item in batch.items), batch.ranks
        last, *others = {self._last.get(rank) for rank in ranks}
        if last is not None and not others and not requests.isdisjoint(last.requests):
            pause = max(0.0, result.started - last.end)
            if is_usual and flight.is_step and flight.predicted and pause < result.seconds:
                ratio = min(MOST, (pause + result.seconds) / flight.predicted)
                self.value = FORGET * self.value + (1 - FORGET) * ratio
        for rank, each in self._last.items():
            if not requests.isdisjoint(each.requests):
                self._last[rank] = each._replace(requests=each.requests - requests)
        self._last |= dict.fromkeys(ranks, _Last(batch.id, result.started + result.seconds, requests))
