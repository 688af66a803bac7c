"""How guidance and the solver change a request's size: rows of a step, steps of a run, tokens and seconds."""

from __future__ import annotations

import msgspec
import pytest
from fakes import MODEL, FakeWorkers, apply, make_edit, with_spec

from core.config import SchedulerConfig
from core.messages.engine import EngineRequest, Finished
from core.routing.request_shape import RequestShape
from core.sampling_params import SamplingParams
from core.scheduling.ops.denoise import Denoise
from core.scheduling.ops.text_encode import TextEncode
from core.scheduling.scheduler import StepScheduler

GUIDED = {"true_cfg_scale": 4.0, "negative_prompt": "a hat"}


def guided(request_id: str, steps: int = 4) -> EngineRequest:
    edit = make_edit(request_id, steps=steps)
    return with_spec(edit, sampling=msgspec.structs.replace(edit.spec.sampling, **GUIDED))


def plans(scheduler: StepScheduler, *edits: EngineRequest) -> list[list[tuple[str, object]]]:
    """Run the edits to their ends; (request id, work) of each plan."""
    workers, seen = FakeWorkers(), []
    for edit in edits:
        scheduler.add(edit)
    while scheduler.num_requests:
        plan = scheduler.schedule(now=0.0)
        assert plan is not None
        workers.submit(plan)
        seen.append([(item.request_id, item.work) for batch in plan.batches for item in batch.items])
        for result in workers.run_one(0):
            apply(scheduler, result)
        scheduler.check_integrity()
    assert all(isinstance(output, Finished) for output in scheduler.take_outputs())
    return seen


def test_workers_get_the_guidance() -> None:
    works = [work for plan in plans(StepScheduler(SchedulerConfig(), {"m": MODEL}), guided("a")) for _, work in plan]
    assert [work.negative_prompt for work in works if isinstance(work, TextEncode)] == ["a hat"]
    assert {work.true_cfg_scale for work in works if isinstance(work, Denoise)} == {4.0}


def test_a_guided_request_takes_two_rows_of_the_token_budget() -> None:
    """280 tokens a row: room for two plain requests is room for one guided."""
    config = SchedulerConfig(max_num_batched_tokens=2 * 280)
    scheduler = StepScheduler(config, {"m": MODEL})
    seen = plans(scheduler, guided("a"), make_edit("b", arrival=1.0), make_edit("c", arrival=2.0))
    steps = [{name for name, work in plan if isinstance(work, Denoise)} for plan in seen]
    assert {"a"} in steps
    assert {"b", "c"} in steps
    assert not any("a" in names and len(names) > 1 for names in steps)
    tokens = scheduler.stats().batch_tokens
    assert tokens == 280 * 4 * (2 + 1 + 1)


def test_a_guided_step_counts_as_one_image() -> None:
    scheduler = StepScheduler(SchedulerConfig(), {"m": MODEL})
    plans(scheduler, guided("a"))
    stats = scheduler.stats()
    assert (stats.steps, stats.batch_requests, stats.tokens_skipped) == (4, 4, 0)


def test_routing_counts_both_rows() -> None:
    plain, both = (RequestShape.of_request(edit, MODEL).step_features for edit in (make_edit("a"), guided("b")))
    assert both["m"] == tuple(2 * feature for feature in plain["m"])


@pytest.mark.parametrize(("strength", "steps"), [(1.0, 9), (0.5, 5), (0.2, 1)])
def test_a_second_order_solver_takes_two_steps_but_one_at_the_last(strength: float, steps: int) -> None:
    model = msgspec.structs.replace(MODEL, solver_order=2)
    edit = make_edit("a", steps=5)
    sampling = msgspec.structs.replace(edit.spec.sampling, strength=strength)
    edit = msgspec.structs.replace(with_spec(edit, sampling=sampling), rounds=(model.num_steps(sampling),))
    seen = plans(StepScheduler(SchedulerConfig(), {"m": model}), edit)
    done = [work.step for plan in seen for _, work in plan if isinstance(work, Denoise)]
    assert done == list(range(steps))
    assert model.num_steps(SamplingParams(num_inference_steps=5, strength=strength)) == steps
