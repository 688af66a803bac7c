"""Step profiles: which degrees are useful, what lies between the sizes that were measured, and what is learnt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import MODEL
from hypothesis import given
from hypothesis import strategies as st

from core.costs.cost_model import CostModel
from core.costs.step_profiles import MOST, StepProfiles, useful_degree
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


def measured() -> StepProfiles:
    """Steps of 100 and 400 tokens, at degrees 1 and 2."""
    profiles = StepProfiles()
    for degree, tokens, seconds in [(1, 100, 1.0), (1, 400, 4.0), (2, 100, 1.0), (2, 400, 2.0)]:
        profiles.add("k", degree, 1, tokens, seconds)
    return profiles


def test_sizes_between_are_interpolated_and_unknown_degrees_are_unknown() -> None:
    profiles = measured()
    assert [profiles.seconds("k", degree, 1, 250) for degree in (1, 2, 4)] == [2.5, 1.5, None]
    assert profiles.seconds("other", 1, 1, 100) is None
    assert profiles.seconds("k", 1, 2, 125) == 2.5, "two rows of 125 tokens"


def test_a_size_measured_with_as_many_rows_counts_more() -> None:
    profiles = measured()
    profiles.add("k", 1, 2, 125, 3.0)
    assert profiles.seconds("k", 1, 2, 125) == 3.0
    assert profiles.seconds("k", 1, 1, 250) == 2.5


def test_what_steps_take_is_learnt_for_their_size_class_alone() -> None:
    profiles = measured()
    for _ in range(60):
        profiles.observe("k", 2, 1, 250, 1.8)
    assert profiles.seconds("k", 2, 1, 250) == pytest.approx(1.8, rel=0.01)
    assert profiles.seconds("k", 1, 1, 250) == pytest.approx(3.0, rel=0.01), "the machine is slower as a whole"
    for _ in range(60):
        profiles.observe("k", 1, 1, 250, 2.5)
    assert profiles.seconds("k", 1, 1, 250) == pytest.approx(2.5, rel=0.01)
    assert profiles.seconds("k", 2, 1, 250) == pytest.approx(1.8, rel=0.01)
    assert profiles.seconds("k", 2, 1, 400) == 2.0


def test_a_degree_that_was_never_measured_is_not_learnt() -> None:
    profiles = measured()
    profiles.observe("k", 4, 1, 250, 0.1)
    assert profiles.seconds("k", 4, 1, 250) is None


@given(st.lists(st.floats(1e-4, 1e4), max_size=40))
def test_one_step_changes_little_and_predictions_stay_above_0(observed: list[float]) -> None:
    profiles, before = measured(), 2.0
    for seconds in observed:
        profiles.observe("k", 2, 1, 400, seconds)
        after = profiles.seconds("k", 2, 1, 400)
        assert after is not None
        assert before * 0.9 <= after <= before * (0.9 + 0.1 * MOST) + 1e-12
        before = after


@pytest.mark.parametrize("numbers", [(0, 1, 1, 1.0), (1, 1, 0, 1.0), (1, 1, 1, 0.0)])
def test_an_unusable_measurement_is_refused(numbers: tuple[int, int, int, float]) -> None:
    with pytest.raises(ValueError, match="numbers above 0"):
        StepProfiles().add("k", *numbers)


# ------------------------------------------------------------------------------------------------ from samples


def test_samples_of_a_profile_predict_steps_at_their_degrees() -> None:
    predictor, op = Predictor(CostModel(), BINDINGS), OPS["denoise"]
    work = Work.of([256])
    samples = [
        CostSample("m", "transformer", "denoise", work, 1.0 / degree, is_profile=True, degree=degree)
        for degree in (1, 2)
    ]
    predictor.learn(samples)
    assert [predictor.step_seconds(KEYS, op, work, degree) for degree in (1, 2, 4)] == [1.0, 0.5, 0.0]
    for _ in range(60):
        predictor.cost.observe(predictor.key(KEYS, op, 2), work, 0.7)
    assert predictor.step_seconds(KEYS, op, work, 2) == pytest.approx(0.7, rel=0.01)


def test_without_a_profile_one_rank_is_predicted_as_any_batch_and_several_are_unknown() -> None:
    predictor, op, work = Predictor(CostModel(), BINDINGS), OPS["denoise"], Work.of([256])
    predictor.learn([CostSample("m", "transformer", "denoise", work, 1.0)])
    assert (
        predictor.step_seconds(KEYS, op, work, 1)
        == pytest.approx(1.0, rel=1e-4)
        == predictor.op_seconds(KEYS, op, work)
    )
    assert predictor.step_seconds(KEYS, op, work, 2) == 0.0
