"""The parts of a plan: every rank gets what is for it, once, and ranks without anything get nothing."""

from __future__ import annotations

from core.handles import ModelKey, TensorKey, TensorRef
from core.messages.plan_parts import parts_of
from core.messages.worker import Batch, Delivery, Free, Load, PageCopy, PageForget, StepPlan, Transfer

KEY = TensorKey("r", "node", "x")
MODEL, OTHER = ModelKey("0f", "transformer"), ModelKey("1e", "vae")


def test_each_rank_gets_what_names_it() -> None:
    alone, both = Batch(1, "denoise", (1,), ()), Batch(2, "denoise", (0, 1), ())
    transfer, delivery = Transfer(TensorRef(KEY, 2), 2), Delivery(KEY, 3, 0)
    free = Free(KEY, (2, 4))
    plan = StepPlan(7, batches=(alone, both), transfers=(transfer,), deliveries=(delivery,), free=(free,))
    assert parts_of(plan) == {
        0: StepPlan(7, batches=(both,)),
        1: StepPlan(7, batches=(alone, both)),
        2: StepPlan(7, transfers=(transfer,), free=(free,)),
        3: StepPlan(7, deliveries=(delivery,)),
        4: StepPlan(7, free=(free,)),
    }


def test_each_rank_gets_the_orders_for_its_pages_and_one_those_for_files() -> None:
    copies = tuple(PageCopy(f"k{rank}", 64, 64, "host", "device", None, rank) for rank in (0, 2))
    forget = tuple(PageForget(f"g{rank}", rank) for rank in (1, 2))
    assert parts_of(StepPlan(1, forget=forget, delete=("t",), file_rank=3, copies=copies)) == {
        0: StepPlan(1, copies=copies[:1]),
        1: StepPlan(1, forget=forget[:1]),
        2: StepPlan(1, forget=forget[1:], copies=copies[1:]),
        3: StepPlan(1, delete=("t",)),
    }


def test_models_go_to_the_ranks_that_are_to_load_them() -> None:
    both, one = Load((0, 2), (MODEL,), (OTHER,)), Load((3,), (OTHER,))
    assert parts_of(StepPlan(1, loads=(both, one), delete=("t",), file_rank=1)) == {
        0: StepPlan(1, loads=(both,)),
        1: StepPlan(1, delete=("t",)),
        2: StepPlan(1, loads=(both,)),
        3: StepPlan(1, loads=(one,)),
    }
    assert parts_of(StepPlan(1)) == {}
