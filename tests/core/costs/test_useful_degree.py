"""Which degrees are useful, and what a profile says of steps at each of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import MODEL

from core.costs.cost_model import CostModel
from core.costs.useful_degree import useful_degree
from core.graph.op import OPS
from core.graph.work import Work
from core.messages.worker import CostSample
from core.scheduling.reports.predictor import Predictor
from core.scheduling.requests.bindings import Bindings

DDIT = json.loads((Path(__file__).parents[3] / "benchmarks/simulation/data/ddit.json").read_text())
SPEEDS = {
    name: {int(degree): speed for degree, speed in of.items()}
    for name, of in DDIT["dit_speedup_by_degree"].items()
    if name != "source"
}
DEGREES = {name: degree for name, degree in DDIT["optimal_degree_B"].items() if name != "source"}


@pytest.mark.parametrize("name", ["144p", "240p", "360p"])
def test_the_degrees_of_the_paper(name: str) -> None:
    assert useful_degree({degree: 1 / speed for degree, speed in SPEEDS[name].items()}) == DEGREES[name]


BINDINGS = Bindings({"m": MODEL})
KEYS = BINDINGS.keys("m", "transformer")


def test_the_rule_that_the_paper_prints_gives_others() -> None:
    """The degree with the largest z."""
    largest = {name: max((2, 4, 8), key=lambda d: 1 - of[d // 2] / of[d]) for name, of in SPEEDS.items()}
    assert largest == {"144p": 2, "240p": 2, "360p": 2}


def test_useful_degrees_have_no_gaps() -> None:
    assert useful_degree({1: 8.0, 4: 1.0}) == 1
    assert useful_degree({1: 8.0, 2: 7.0, 4: 1.0}) == 1
    assert useful_degree({1: 8.0}) == 1


def test_what_is_unknown_shows_no_gain() -> None:
    assert useful_degree({1: 0.0, 2: 0.0, 4: 0.0}) == 1
    assert useful_degree({1: 0.0, 2: 1.0}) == 1
    assert useful_degree({1: 8.0, 2: 0.0}) == 1


# ------------------------------------------------------------------------------------------------ from samples


def test_samples_of_a_profile_predict_steps_at_their_degrees() -> None:
    predictor, op = Predictor(CostModel(), BINDINGS), OPS["denoise"]
    work = Work.of([256])
    samples = [CostSample("m", "denoise", work, 1.0 / degree, is_profile=True, degree=degree) for degree in (1, 2)]
    predictor.learn(samples)
    assert [predictor.step_seconds(KEYS, op, work, degree) for degree in (1, 2, 4)] == [1.0, 0.5, 0.0]
    for _ in range(400):
        predictor.cost.observe(predictor.key(KEYS, op, 2), work, 0.7)
    assert predictor.step_seconds(KEYS, op, work, 2) == pytest.approx(0.7, rel=0.01)
    assert predictor.step_seconds(KEYS, op, work, 1) == pytest.approx(1.4, rel=0.01), "the machine is slower"
    for _ in range(400):
        predictor.cost.observe(predictor.key(KEYS, op, 1), work, 1.0)
    assert [predictor.step_seconds(KEYS, op, work, degree) for degree in (1, 2)] == pytest.approx([1.0, 0.7], rel=0.01)


def test_without_a_profile_one_rank_is_predicted_as_any_batch_and_several_are_unknown() -> None:
    predictor, op, work = Predictor(CostModel(), BINDINGS), OPS["denoise"], Work.of([256])
    predictor.learn([CostSample("m", "denoise", work, 1.0)])
    assert (
        predictor.step_seconds(KEYS, op, work, 1)
        == pytest.approx(1.0, rel=1e-4)
        == predictor.op_seconds(KEYS, op, work)
    )
    assert predictor.step_seconds(KEYS, op, work, 2) == 0.0
