"""Which part of a plan goes to which rank."""

from __future__ import annotations

from core.handles import ArrayRef, TensorKey
from core.messages.worker import PageCopy, PageForget, StepPlan
from model_executor.executor import _part_of

PLACE = ArrayRef(1, 0, (64,), "uint8")


def test_each_rank_gets_the_orders_for_its_pages_and_the_first_one_those_for_files() -> None:
    copies = tuple(PageCopy(f"k{rank}", 64, 64, "host", "device", PLACE, rank) for rank in (0, 2))
    forget = tuple(PageForget(f"g{rank}", rank) for rank in (1, 2))
    plan = StepPlan(seq=1, forget=forget, delete=("t",), copies=copies)
    assert [_part_of(plan, rank) for rank in range(4)] == [
        StepPlan(seq=1, delete=("t",), copies=copies[:1]),
        StepPlan(seq=1, forget=forget[:1]),
        StepPlan(seq=1, forget=forget[1:], copies=copies[1:]),
        None,
    ]


def test_what_is_freed_is_freed_on_every_rank() -> None:
    plan = StepPlan(seq=1, free=(TensorKey("r", "", ""),))
    assert [_part_of(plan, rank) for rank in range(2)] == [plan, plan]
