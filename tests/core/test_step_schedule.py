"""StepSchedule: which steps of a run are computed, for the number of steps that was measured and for others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.step_schedule import StepSchedule, schedule_for


def make(
    num_steps: int, *computed: int, full_steps: tuple[int, ...] = (), full_steps_from: float = 0.0
) -> StepSchedule:
    return StepSchedule(
        num_inference_steps=num_steps,
        computed=computed,
        full_steps=full_steps,
        full_steps_from=full_steps_from,
        ssim_mean=0.99,
        ssim_p10=0.98,
    )


SPARSE = make(28, 0, 1, 2, 3, 4, 8, 12, 16, 20, 24, full_steps=(0, 3), full_steps_from=0.2)


@st.composite
def schedules(draw: st.DrawFn) -> StepSchedule:
    num_steps = draw(st.integers(1, 60))
    others = draw(st.sets(st.integers(1, num_steps - 1))) if num_steps > 1 else set()
    return make(num_steps, 0, *sorted(others))


@given(schedules())
def test_a_run_of_the_measured_length_computes_the_measured_steps(schedule: StepSchedule) -> None:
    assert schedule.steps_of(schedule.num_inference_steps) == schedule.computed


@given(schedules(), st.integers(1, 200))
def test_no_step_of_another_length_is_larger_than_the_measured_ones(schedule: StepSchedule, num_steps: int) -> None:
    """Unless the run's own steps are larger."""
    chosen = schedule.steps_of(num_steps)
    assert chosen[0] == 0
    measured = (*schedule.computed, schedule.num_inference_steps)
    for step, following in zip(chosen, (*chosen[1:], num_steps), strict=True):
        index = max(i for i, begun in enumerate(schedule.computed) if begun * num_steps <= step * measured[-1])
        largest = (measured[index + 1] - measured[index]) / measured[-1]
        assert following - step >= 1
        assert following == step + 1 or (following - step) / num_steps <= largest + 1e-9


def test_short_runs_compute_every_step_and_long_ones_no_more_than_needed() -> None:
    assert SPARSE.steps_of(8) == tuple(range(8))
    assert SPARSE.steps_of(56) == (0, 2, 4, 6, 8, 16, 24, 32, 40, 48)


def test_full_steps_keep_their_places() -> None:
    assert [SPARSE.full_steps_at(0.3, num) for num in (10, 8, 20)] == [(0, 3), (0, 3), (0, 6)]
    assert [SPARSE.full_steps_at(0.2, num) for num in (1, 2, 3)] == [(), (0,), (0, 1)], "some read their pages"
    assert [make(28, 0, 1, full_steps=(0, 1)).full_steps_at(0.2, num) for num in (1, 2)] == [(0,), (0, 1)]
    assert SPARSE.full_steps_at(0.19, 10) == ()
    assert make(28, 0, 1).full_steps_at(1.0, 2) == ()


@pytest.mark.parametrize("full", [(1,), (0, 2), (0, 3, 1), (0, 0)])
def test_full_steps_must_be_computed_and_rise_from_the_first(full: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="full steps must rise from 0"):
        make(28, 0, 1, 3, full_steps=full)


def test_the_schedule_of_the_same_number_of_steps_is_used_else_that_of_most() -> None:
    eight = make(8, 0, 2)
    assert schedule_for((eight, SPARSE), 8) is eight
    assert schedule_for((eight, SPARSE), 12) is SPARSE


@pytest.mark.parametrize("computed", [(), (1, 2), (0, 2, 2), (0, 28), (0, 5, 3)])
def test_steps_that_do_not_rise_from_the_first_are_refused(computed: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must rise from 0"):
        make(28, *computed)
