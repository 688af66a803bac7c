"""Earliest finish first: batches of several kinds of work, one after the other on a rank that they share (NeuStream,
section 5).

If each kind had its share of the rank all the time, its batches would end at certain times. The rank does the batches
one by one instead, each at full speed, in the order of these times: none ends later than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """A batch."""

    kind: str
    ready: float  # seconds: it cannot start before
    seconds: float  # on the whole rank
    share: float  # of the rank that its kind has, above 0, at most 1


def spatial_ends(pieces: Sequence[Piece]) -> list[float]:
    """When each ends if every kind has its share of the rank. Those of one kind run in the order of the sequence."""
    free: dict[str, float] = {}
    ends = list[float]()
    for piece in pieces:
        free[piece.kind] = max(piece.ready, free.get(piece.kind, 0.0)) + piece.seconds / piece.share
        ends.append(free[piece.kind])
    return ends


def temporal_ends(pieces: Sequence[Piece]) -> list[float]:
    """When each ends on the whole rank, with the earliest spatial end first; one that is more urgent interrupts."""
    due, left = spatial_ends(pieces), [piece.seconds for piece in pieces]
    ends, now = [0.0] * len(pieces), 0.0
    waiting = set(range(len(pieces)))
    while waiting:
        ready = [index for index in waiting if pieces[index].ready <= now]
        arrivals = [pieces[index].ready for index in waiting if pieces[index].ready > now]
        if not ready:
            now = min(arrivals)
            continue
        index = min(ready, key=lambda index: (due[index], index))
        until = min([now + left[index], *arrivals])
        left[index] -= until - now
        if until >= now + left[index] or left[index] <= 1e-12:
            ends[index] = until
            waiting.remove(index)
        now = until
    return ends
