"""Earliest finish first: batches of several kinds of work, one after the other on a rank that they share (NeuStream,
section 5).

If each kind had its share of the rank all the time, its batches would end at certain times. The rank runs them one by
one instead, each at full speed, in the order of these times: none ends later than that if a more urgent batch may
interrupt another one, and by at most one batch later if it has to wait for its end.

Shares of kinds without work go to the others. With shares that are fixed a kind that has had the rank to itself would
be ahead of its share, and would have to wait for as long when others come. This is weighted fair queueing (Parekh and
Gallager, IEEE/ACM Transactions on Networking 1993): times are compared in virtual time, which every share works off at
the same rate, and which therefore need not be known in seconds.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class FinishOrder(Generic[K]):
    """The order of one rank. It keeps when the last batch of each kind would end. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._now = 0.0
        self._virtual = 0.0  # seconds of work done so far for each unit of share
        self._finish: dict[K, float] = {}  # kind with work left -> virtual time at which its last batch ends
        self._shares: dict[K, float] = {}  # of these kinds

    def add(self, kind: K, seconds: float, share: float, now: float) -> float:
        """Note a batch that can run from now on, after all of its kind; its virtual finish time: of the batches that
        wait, the one with the least goes first. seconds: on the whole rank. share: above 0, in any unit. now: no
        earlier than at the last call.
        """
        self._advance(now)
        self._shares[kind] = share
        self._finish[kind] = self._finish.get(kind, self._virtual) + seconds / share
        return self._finish[kind]

    def _advance(self, now: float) -> None:
        """Let all kinds with work left share the rank until now."""
        while self._finish:
            rate = 1 / sum(self._shares[kind] for kind in self._finish)
            end = min(self._finish.values())
            seconds = (end - self._virtual) / rate
            if self._now + seconds > now:
                self._virtual += (now - self._now) * rate
                break
            self._now += seconds
            self._virtual = end
            self._finish = {kind: finish for kind, finish in self._finish.items() if finish > end}
            self._shares = {kind: self._shares[kind] for kind in self._finish}
        self._now = now
