"""Predictions of a mix of edits: requests of records, in simulated time, with what each kind costs beside its batches."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import msgspec
import pytest
from fakes import MODEL, make_edit

from benchmarks.load.client import Outcome, Run
from benchmarks.serving.mix_prediction import Alone, OneEngine, by_seed, predict
from benchmarks.serving.recorded import Arrival, Batch, Elastic
from benchmarks.serving.recorded_server import Lone
from benchmarks.simulation.server_engine import Known, Surroundings
from core.graph.op import OPS
from core.graph.work import Work
from core.messages.codec import encode
from core.messages.engine import EngineRequest
from core.messages.worker import CostSample
from core.scheduling.policies import policy_class

SECONDS = {"text_encode": 0.1, "image_encode": 0.2, "denoise": 1.0, "decode": 0.4}
"""Of one item of each op, whatever its size; a step on two ranks takes 0.6 of it."""

STEPS = 4
COMPUTED = sum(SECONDS.values()) + (STEPS - 1) * SECONDS["denoise"]
QUICK, SLOW = Surroundings(0.25, 0.5, trip=0.0, outside_cpu=0.0), Surroundings(1.0, 2.0, trip=0.0, outside_cpu=0.0)


def known() -> Known:
    samples = [
        CostSample(
            MODEL.name,
            OPS[op].component,
            op,
            Work.of([tokens] * number),
            number * seconds * (0.6 if degree == 2 else 1.0),
            degree=degree,
            is_profile=True,
        )
        for op, seconds in SECONDS.items()
        for degree in ((1, 2) if op == "denoise" else (1,))
        for tokens in (24, 256, 280)
        for number in (1, 2, 4)
        for _ in range(20)
    ]
    return Known(MODEL, (), tuple(samples))


def edit(seed: int, *, is_mask_aware: bool = False) -> EngineRequest:
    request = make_edit(f"name-{seed}", steps=STEPS)
    sampling = msgspec.structs.replace(request.spec.sampling, seed=seed)
    spec = msgspec.structs.replace(request.spec, sampling=sampling, is_mask_aware=is_mask_aware)
    return msgspec.structs.replace(request, model=MODEL.name, spec=spec)


def arrival(request: EngineRequest, now: float) -> Arrival:
    return Arrival(base64.b64encode(encode(request)).decode(), now)


def alone(stretch: float = 1.0) -> Alone:
    batches = [
        Batch(0, op, ("name-0",), 0.0, 0.0, stretch * seconds, engine_cpu=0.0, policy_cpu=0.0)
        for op, seconds in SECONDS.items()
    ]
    run = Run([outcome()], 1.0, 0.0)
    around: Mapping[str, Surroundings] = {"quick": QUICK, "slow": SLOW}
    return Alone({kind: Lone(run, [arrival(edit(0), 0.0)], batches, each) for kind, each in around.items()}, [])


def outcome() -> Outcome:
    return Outcome(0.0, 0.0, 1.0, None, "", {})


def test_recorded_requests_are_told_from_warm_ups_and_put_in_the_order_of_their_edits() -> None:
    records = [arrival(edit(0), 1.0), arrival(edit(1), 2.0), arrival(edit(1), 5.5), arrival(edit(0), 6.0)]
    warm_ups, requests = by_seed(Run([outcome(), outcome()], 9.0, 0.0, started=5.0), records)
    assert [request.spec.sampling.seed for request in warm_ups] == [0, 1]
    assert [request.spec.sampling.seed for request in requests] == [0, 1]


@pytest.mark.parametrize("system", [OneEngine("elastic", 1), OneEngine("step_batching", 1)])
def test_each_edit_costs_what_its_kind_costs_beside_its_batches(system: OneEngine) -> None:
    found = predict(known(), alone(), system, [], [edit(0), edit(1)], ["quick", "slow"], [2.0, 50.0], {})
    assert found == [
        pytest.approx(COMPUTED + QUICK.prepare + QUICK.deliver, rel=0.05),
        pytest.approx(COMPUTED + SLOW.prepare + SLOW.deliver, rel=0.05),
    ]


def test_a_fixed_degree_shares_the_steps_between_the_ranks() -> None:
    one, two = (
        predict(known(), alone(), OneEngine("step_batching", 2, degree), [], [edit(0)], ["quick"], [0.0], {})[0]
        for degree in (1, 2)
    )
    assert one - two == pytest.approx(0.4 * STEPS * SECONDS["denoise"], rel=0.1)


def test_batches_take_longer_by_what_they_took_alone() -> None:
    measured, learnt = alone(stretch=1.5), known()
    stretch = measured.stretch(learnt)
    assert stretch == {op: pytest.approx(1.5, rel=0.05) for op in SECONDS}
    plain, longer = (
        predict(learnt, measured, OneEngine("elastic", 1), [], [edit(0)], ["quick"], [0.0], each)[0]
        for each in ({}, stretch)
    )
    assert longer - plain == pytest.approx(0.5 * COMPUTED, rel=0.1)


def test_a_masked_edit_of_a_template_that_was_not_prepared_is_not_predicted() -> None:
    with pytest.raises(AssertionError, match="cold templates"):
        system = OneEngine("elastic", 1)
        predict(known(), alone(), system, [], [edit(0, is_mask_aware=True)], ["quick"], [0.0], {})


def test_the_recorded_elastic_shares_steps_as_elastic_does() -> None:
    inner = policy_class(Elastic.inner)
    assert (Elastic.shares_steps, Elastic.gives_up) == (inner.shares_steps, inner.gives_up) == (True, False)
