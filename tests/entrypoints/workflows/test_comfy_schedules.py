"""Which of diffusers' schedules ComfyUI's even ones are, as `entrypoints.workflows.comfy` says."""

from __future__ import annotations

from math import exp
from typing import Any

import numpy as np
import pytest
from diffusers import EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

from entrypoints.workflows.comfy.sampler_names import TIMESTEPS, passed

STEPS = (1, 4, 20, 50)


def left(schedule: str, steps: int, family: str) -> list[float]:
    """Training time that is left before each step, 0..1."""
    return [1 - passed(schedule, step, steps, family) for step in range(steps)]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("schedule", "spacing"), [("normal", "linspace"), ("simple", "trailing"), ("ddim_uniform", "leading")]
)
def test_even_schedules_of_unets_are_spacings_of_timesteps(schedule: str, spacing: str, steps: int) -> None:
    scheduler = EulerDiscreteScheduler(timestep_spacing=spacing, steps_offset=1)
    scheduler.set_timesteps(steps)
    expected = [999 * each for each in left(schedule, steps, "")]
    if (schedule, steps) == ("normal", 1):
        expected = [0.0]  # diffusers' only step is the lowest of the spacing's, ComfyUI's the highest
    np.testing.assert_allclose(scheduler.timesteps.numpy(), expected, atol=1e-3)


def test_sgm_uniform_is_nearly_trailing() -> None:
    scheduler = EulerDiscreteScheduler(timestep_spacing="trailing")
    scheduler.set_timesteps(20)
    expected = [999 * each for each in left("sgm_uniform", 20, "")]
    assert 0.5 < np.abs(scheduler.timesteps.numpy() - expected).max() < 1


@pytest.mark.parametrize("steps", STEPS[1:])
def test_flow_matching_has_one_schedule_of_each_family(steps: int) -> None:
    sd3 = FlowMatchEulerDiscreteScheduler(shift=3.0)
    sd3.set_timesteps(steps)
    shifted = [3 * each / (1 + 2 * each) for each in left("normal", steps, "sd3")]
    np.testing.assert_allclose(sd3.sigmas[:-1].numpy(), shifted, rtol=1e-5)
    flux = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    flux.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=1.15)  # at 1024 x 1024
    levels = [exp(1.15) / (exp(1.15) + 1 / each - 1) for each in left("simple", steps, "flux")]
    np.testing.assert_allclose(flux.sigmas[:-1].numpy(), levels, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "schedule", "last"),
    [("", "simple", 50), ("sd3", "simple", 50), ("flux", "simple", 500), ("flux", "ddim_uniform", 2)],
)
def test_the_last_of_twenty_steps_is_above_the_lowest_level(family: str, schedule: str, last: Any) -> None:
    """By its place among the levels of the training, counted from the lowest one, which is 1; of UNets from 0."""
    number = TIMESTEPS[family] - (not family)
    assert left(schedule, 20, family)[-1] * number == pytest.approx(last - (not family))
