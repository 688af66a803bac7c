"""Batches that share a rank by earliest finish, against the same batches with fixed shares of it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.scheduling.policies.papers.finish_order import FinishOrder

SHARES = {"a": 0.5, "b": 0.3, "c": 0.2}


class Piece(NamedTuple):
    """A batch."""

    kind: str
    ready: float
    seconds: float


PIECE = st.builds(Piece, st.sampled_from("abc"), st.floats(0.0, 20.0), st.floats(0.01, 5.0))
PIECES = st.lists(PIECE, max_size=12).map(lambda pieces: sorted(pieces, key=lambda piece: piece.ready))


def spatial_ends(pieces: list[Piece]) -> list[float]:
    """When each ends if every kind has its share of the rank and no more."""
    free = dict.fromkeys(SHARES, 0.0)
    ends = list[float]()
    for kind, ready, seconds in pieces:
        free[kind] = max(ready, free[kind]) + seconds / SHARES[kind]
        ends.append(free[kind])
    return ends


def temporal_ends(pieces: list[Piece], *, interrupts: bool) -> list[float]:
    """When each ends one after the other, the earliest finish first. interrupts: a batch may interrupt another one."""
    order: FinishOrder[str] = FinishOrder()
    coming, left = list(enumerate(pieces)), [piece.seconds for piece in pieces]
    waiting, ends, now = dict[int, float](), [0.0] * len(pieces), 0.0
    while coming or waiting:
        while coming and (not waiting or coming[0][1].ready <= now):
            index, (kind, ready, seconds) = coming.pop(0)
            now = max(now, ready)
            waiting[index] = order.add(kind, seconds, SHARES[kind], ready)
        first = min(waiting, key=lambda index: waiting[index])
        end = now + left[first]
        if interrupts and coming and coming[0][1].ready < end:
            left[first] -= coming[0][1].ready - now
            now = coming[0][1].ready
        else:
            now = ends[first] = end
            del waiting[first]
    return ends


@given(PIECES)
def test_no_batch_ends_later_than_with_a_share_of_its_own(pieces: list[Piece]) -> None:
    ends = temporal_ends(pieces, interrupts=True)
    assert all(end <= limit + 1e-6 for end, limit in zip(ends, spatial_ends(pieces), strict=True))


@given(PIECES)
def test_a_batch_ends_at_most_one_batch_later_if_none_is_interrupted(pieces: list[Piece]) -> None:
    ends, longest = temporal_ends(pieces, interrupts=False), max((piece.seconds for piece in pieces), default=0.0)
    assert all(end <= limit + longest + 1e-6 for end, limit in zip(ends, spatial_ends(pieces), strict=True))


@pytest.mark.parametrize("interrupts", [False, True])
def test_a_long_batch_waits_for_short_ones_that_would_end_before(interrupts: bool) -> None:
    """The first case of the paper's figure 10: three of one kind before one of another."""
    pieces = [Piece("a", 0.0, 1.0)] * 3 + [Piece("b", 0.0, 2.5)]
    assert spatial_ends(pieces) == pytest.approx([2.0, 4.0, 6.0, 2.5 / 0.3])
    assert temporal_ends(pieces, interrupts=interrupts) == pytest.approx([1.0, 2.0, 3.0, 5.5])


def test_a_kind_that_had_the_rank_to_itself_need_not_wait_for_it() -> None:
    """After 100 s alone it takes turns with another one at once, by their shares."""
    pieces = [Piece("a", float(second), 1.0) for second in range(100)]
    pieces += [Piece(kind, 100.0, 1.0) for kind in 8 * "ab"]
    ends = temporal_ends(pieces, interrupts=False)
    done = [pieces[index].kind for index in sorted(range(100, len(pieces)), key=lambda index: ends[index])]
    assert done[:8].count("a") == 5, "of eight"


def test_what_waits_goes_before_work_that_comes_without_end_and_takes_no_time() -> None:
    order: FinishOrder[str] = FinishOrder()
    finish = order.add("a", 1.0, 0.5, 0.0)
    assert order.add("b", 0.0, 0.5, 0.0) < finish, "it goes first"
    assert order.add("b", 0.0, 0.5, 10.0) >= finish, "a has waited"


def test_a_kind_without_work_is_forgotten() -> None:
    """Kinds come for as long as an engine serves."""
    order: FinishOrder[str] = FinishOrder()
    for second in range(5):
        order.add(f"kind {second}", 1.0, 0.5, 10.0 * second)
    assert [*order._shares] == [*order._finish] == ["kind 4"]
