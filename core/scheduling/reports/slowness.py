"""Slowness: how much longer steps take than predicted, with the pauses before them."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

from core.messages.worker import BatchResult
from core.scheduling.ranks.in_flight import Flight

FORGET = 0.98
"""Weight of earlier observations after each new one, as for profiles."""

MOST = 2.0
"""A step that takes longer than this multiple of its prediction has another cause, and counts as this multiple."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Last:
    """The last batch of one rank or several; its identity tells it from others."""

    end: float


class Slowness:
    """Between two batches a result and a plan travel, unless the second batch was sent ahead; and while other ranks are
    busy, batches take longer than on average.
    """

    def __init__(self) -> None:
        self.value = 1.0
        """Time from the end of a batch to the end of the step after it, as a multiple of that one's predicted time."""
        self._last: dict[int, _Last] = {}  # by rank
        self._last_of = WeakValueDictionary[str, _Last]()  # by request; goes when no rank has it as its last

    def note(self, flight: Flight, result: BatchResult, *, is_usual: bool) -> None:
        """Note a batch that has ended. A step counts only if its ranks' last batch was the same and had one of its
        requests, which waited for nothing else. A pause longer than the step has another cause and does not count.
        is_usual: whether it trains the cost model.
        """
        batch = flight.batch
        last, *others = {self._last.get(rank) for rank in batch.ranks}
        requests = [item.request_id for item in batch.items]
        if last is not None and not others and any(self._last_of.get(name) is last for name in requests):
            pause = max(0.0, result.started - last.end)
            if is_usual and flight.is_step and flight.predicted and pause < result.seconds:
                ratio = min(MOST, (pause + result.seconds) / flight.predicted)
                self.value = FORGET * self.value + (1 - FORGET) * ratio
        this = _Last(result.started + result.seconds)
        self._last |= dict.fromkeys(batch.ranks, this)
        self._last_of.update(dict.fromkeys(requests, this))
