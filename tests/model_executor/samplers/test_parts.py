"""Parts of a run: where they are cut, and that together they are the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FlowMatchLCMScheduler,
    PNDMScheduler,
)

from model_executor.samplers.sampling import Sampling, Scale, num_before
from model_executor.samplers.timestep_sampling import TimestepSampling

SHARES = (0.01, 0.3, 0.5, 0.8, 0.99)
TIMESTEP = {
    DDIMScheduler: {},
    DPMSolverMultistepScheduler: {},
    EulerDiscreteScheduler: {"use_karras_sigmas": True},
    EulerAncestralDiscreteScheduler: {"timestep_spacing": "trailing"},
    PNDMScheduler: {"skip_prk_steps": True},
}
FLOW = (FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler, FlowMatchLCMScheduler)


@pytest.mark.parametrize("scheduler", TIMESTEP, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("steps", [2, 3, 7])
@pytest.mark.parametrize("left_out", [0, 1])
def test_two_parts_are_the_run(scheduler: Any, steps: int, left_out: int) -> None:
    sampling = TimestepSampling(scheduler(**TIMESTEP[scheduler]))
    whole = sampling.noise_levels(sampling.run(steps + left_out, steps))
    for share in SHARES:
        runs = [sampling.run(steps + left_out, steps, part) for part in ((0.0, share), (share, 1.0))]
        first, second = map(sampling.noise_levels, runs)
        assert len(first) > 1
        assert len(second) > 1
        assert first[-1] == second[0]
        assert torch.equal(torch.cat([first, second[1:]]), whole)


@pytest.mark.parametrize("scheduler", FLOW)
@pytest.mark.parametrize("steps", [2, 3, 7])
def test_two_parts_are_the_run_in_flow_matching(scheduler: Any, steps: int) -> None:
    sampling = Sampling(scheduler())
    timesteps = {"num_inference_steps": steps}
    whole = sampling.schedule(steps, steps, timesteps)
    for share in SHARES:
        first, second = (sampling.schedule(steps, steps, timesteps, part) for part in ((0.0, share), (share, 1.0)))
        assert torch.equal(torch.cat([first, second[1:]]), whole)
        assert len(second) > 1
        assert len(first) > 1
        assert (len(first) - 1) % sampling.order == 0, "no step is cut between its two calls"


def test_the_cut_is_where_the_pipelines_have_it() -> None:
    """At round(T - share * T), which the first model still takes."""
    timesteps = torch.tensor([981.0, 741.0, 501.0, 200.0, 1.0])
    assert [num_before(share, timesteps, 1000, 1) for share in (0.5, 0.499, 0.8, 0.801)] == [3, 3, 4, 4]
    assert num_before(0.498, timesteps, 1000, 1) == 2


@pytest.mark.parametrize(
    ("sampling", "scale"),
    [
        (lambda: TimestepSampling(DDIMScheduler()), "variance"),
        (lambda: TimestepSampling(PNDMScheduler(skip_prk_steps=True)), "variance"),
        (lambda: TimestepSampling(DPMSolverMultistepScheduler(use_karras_sigmas=True)), "variance"),
        (lambda: TimestepSampling(EulerDiscreteScheduler()), "signal"),
        (lambda: TimestepSampling(EulerDiscreteScheduler(use_karras_sigmas=True)), "signal"),
        (lambda: TimestepSampling(EulerAncestralDiscreteScheduler(timestep_spacing="trailing")), "signal"),
        *((lambda kind=kind: Sampling(kind()), "sum") for kind in FLOW),
    ],
)
def test_the_scale_of_noised_latents(sampling: Any, scale: Scale) -> None:
    assert sampling().scale == scale
