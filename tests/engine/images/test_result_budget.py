"""ResultBudget: memory stays bounded, one owner leaves room for others, and every edit can finish."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.images.result_budget import ResultBudget

TOTAL, PER_OWNER = 100, 50


def make_budget(*edits: str) -> ResultBudget:
    """edits: the first letter of each is its owner."""
    budget = ResultBudget(TOTAL, PER_OWNER)
    for edit_id in edits:
        budget.join(edit_id, edit_id[0])
    return budget


def test_each_owner_may_use_its_own_share() -> None:
    budget = make_budget("a0", "a1", "b0")
    budget.take("a0", 40)
    assert budget.has_room("a1", 10)
    assert not budget.has_room("a1", 11)
    assert budget.has_room("b0", 50)


def test_the_oldest_edit_of_an_owner_may_exceed_its_share_but_not_use_that_of_others() -> None:
    budget = make_budget("a0", "a1", "b0")
    budget.take("a0", 90)
    assert budget.has_room("a0", 30)
    budget.take("a0", 30)
    assert not budget.has_room("a1", 1)
    assert budget.has_room("b0", 50)
    assert budget.used_bytes == 120


def test_the_total_holds_for_all_but_the_oldest_edit() -> None:
    budget = make_budget("a0", "b0", "c0")
    budget.take("a0", 50)
    budget.take("b0", 45)
    assert not budget.has_room("c0", 6)
    assert budget.has_room("c0", 5)
    assert budget.has_room("a0", 500)
    budget.leave("a0")
    assert budget.has_room("c0", 6)


def test_joining_twice_or_leaving_without_joining_changes_nothing() -> None:
    budget = make_budget("a0", "b0", "a0")
    budget.take("a0", 60)
    budget.join("a0", "a")
    budget.leave("c0")
    assert budget.used_bytes == 60
    budget.leave("a0")
    budget.leave("a0")
    assert budget.used_bytes == 0


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 10), st.integers(1, 30)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_every_edit_gets_all_its_results_and_memory_stays_bounded(
    edits: list[tuple[str, int, int]], random: object
) -> None:
    """Any edit may go next; an edit frees its memory only when it has all of its results."""
    budget = ResultBudget(TOTAL, PER_OWNER)
    size = {f"{owner}{index}": nbytes for index, (owner, _, nbytes) in enumerate(edits)}
    left = {f"{owner}{index}": number for index, (owner, number, _) in enumerate(edits)}
    for edit_id in left:
        budget.join(edit_id, edit_id[0])
    largest = Counter[str]()
    for index, (owner, _, nbytes) in enumerate(edits):
        largest[owner] = max(largest[owner], left[f"{owner}{index}"] * nbytes)
    while left:
        able = [edit_id for edit_id in left if budget.has_room(edit_id, size[edit_id])]
        assert able, f"no edit can continue: {left}"
        edit_id = random.choice(able)  # type: ignore[attr-defined]
        budget.take(edit_id, size[edit_id])
        assert budget.used_bytes <= TOTAL + sum(largest.values()), "one edit of each owner beyond the budget"
        left[edit_id] -= 1
        if not left[edit_id]:
            del left[edit_id]
            budget.leave(edit_id)
    assert budget.used_bytes == 0
