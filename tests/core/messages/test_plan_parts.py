"""The parts of a plan: every rank gets what is for it, once, and ranks without anything get nothing."""

from __future__ import annotations

from core.handles import ModelKey, TensorKey, TensorRef
from core.messages.plan_parts import parts_of
from core.messages.worker import Batch, Delivery, Free, StepPlan, Transfer

KEY = TensorKey("r", "node", "x")
MODEL = ModelKey("m", "transformer")


def test_each_rank_gets_what_names_it() -> None:
    alone, both = Batch(1, "denoise", MODEL, (1,), ()), Batch(2, "denoise", MODEL, (0, 1), ())
    transfer, delivery = Transfer(TensorRef(KEY, 2), 2), Delivery(KEY, 3, 0)
    free = Free(KEY, (2, 4))
    plan = StepPlan(7, batches=(alone, both), transfers=(transfer,), deliveries=(delivery,), free=(free,))
    assert parts_of(plan, 6) == {
        0: StepPlan(7, batches=(both,)),
        1: StepPlan(7, batches=(alone, both)),
        2: StepPlan(7, transfers=(transfer,), free=(free,)),
        3: StepPlan(7, deliveries=(delivery,)),
        4: StepPlan(7, free=(free,)),
    }


def test_pages_go_to_the_first_rank_and_models_to_every_one() -> None:
    assert parts_of(StepPlan(1, delete=("k",)), 3) == {0: StepPlan(1, delete=("k",))}
    loaded = StepPlan(1, load=(MODEL,))
    assert parts_of(loaded, 3) == dict.fromkeys(range(3), loaded)
    assert parts_of(StepPlan(1), 3) == {}
