"""Noise levels and steps against diffusers' own scheduler, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux_fill import calculate_shift
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from core.request import SamplingParams
from model_executor.sampling import advance, make_sigmas, predict_clean

SCHEDULERS: list[dict[str, Any]] = [
    {},
    {"shift": 3.0},
    {"use_dynamic_shifting": True},
    {"use_dynamic_shifting": True, "max_shift": 1.3, "base_image_seq_len": 64, "shift_terminal": 0.1},
    {"use_karras_sigmas": True},
]


def diffusers_scheduler(config: dict[str, Any], steps: int, tokens: int) -> FlowMatchEulerDiscreteScheduler:
    """As FluxFillPipeline sets it."""
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    known = {k: scheduler.config[k] for k in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")}
    mu = calculate_shift(tokens, *(known[k] for k in known))
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return scheduler


@pytest.mark.parametrize("config", SCHEDULERS)
@pytest.mark.parametrize("steps", [2, 8, 28])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trajectory_is_the_schedulers(config: dict[str, Any], steps: int, dtype: torch.dtype) -> None:
    tokens = 60
    theirs = diffusers_scheduler(config, steps, tokens)
    sigmas = make_sigmas(FlowMatchEulerDiscreteScheduler(**config), steps, steps, tokens)
    assert sigmas.shape == (steps + 1,)
    assert torch.equal(sigmas, theirs.sigmas)
    latents = expected = torch.randn(tokens, 64).to(dtype)
    for step, timestep in enumerate(theirs.timesteps):
        velocity = torch.randn(tokens, 64).to(dtype)
        expected = theirs.step(velocity, timestep, expected, return_dict=False)[0]
        latents = advance(latents, velocity, sigmas[step], sigmas[step + 1])
        assert latents.dtype == dtype
        assert torch.equal(latents, expected)


@pytest.mark.parametrize(("steps", "strength", "skipped"), [(8, 1.0, 0), (8, 0.5, 4), (10, 0.35, 6), (3, 0.99, 0)])
def test_strength_leaves_out_leading_steps(steps: int, strength: float, skipped: int) -> None:
    sampling = SamplingParams(num_inference_steps=steps, strength=strength)
    assert sampling.num_denoising_steps == steps - skipped
    scheduler = FlowMatchEulerDiscreteScheduler()
    whole = make_sigmas(scheduler, steps, steps, 16)
    assert torch.equal(make_sigmas(scheduler, steps, sampling.num_denoising_steps, 16), whole[skipped:])


def test_sigmas_do_not_share_the_schedulers_state() -> None:
    """The next request's schedule must not change one in use."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    first = make_sigmas(scheduler, 4, 4, 16)
    kept = first.clone()
    make_sigmas(scheduler, 9, 9, 16).zero_()
    assert torch.equal(first, kept)


def test_clean_prediction_inverts_the_noising() -> None:
    clean, noise, sigma = torch.randn(5, 64), torch.randn(5, 64), torch.tensor(0.7)
    latents = (1 - sigma) * clean + sigma * noise
    torch.testing.assert_close(predict_clean(latents, noise - clean, sigma), clean)
