"""Timesteps and steps against diffusers' own schedulers of UNets, bit for bit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_euler_ancestral_discrete import EulerAncestralDiscreteScheduler
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from diffusers.schedulers.scheduling_pndm import PNDMScheduler
from fakes import MODEL
from torch import Tensor

from core.sampling_params import SamplingParams
from model_executor.samplers.timestep_sampling import TimestepSampling
from tools.random_unet_checkpoints import NOISE_SCHEDULE

V = {"prediction_type": "v_prediction"}
SCHEDULERS: list[Any] = [
    scheduler_class(**NOISE_SCHEDULE, **options)
    for scheduler_class, options in (
        (DDIMScheduler, {"clip_sample": False, "set_alpha_to_one": False}),
        (DDIMScheduler, V | {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True}),
        (PNDMScheduler, {"skip_prk_steps": True}),
        (EulerDiscreteScheduler, {"timestep_spacing": "leading"}),
        (EulerDiscreteScheduler, V | {"use_karras_sigmas": True}),
        (EulerAncestralDiscreteScheduler, {}),
        (DPMSolverMultistepScheduler, {}),
        (DPMSolverMultistepScheduler, V | {"solver_order": 3, "use_karras_sigmas": True}),
        (DPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++", "timestep_spacing": "leading"}),
    )
]
SHAPE = (1, 4, 6, 5)


def name_of(scheduler: Any) -> str:
    return type(scheduler).__name__


def make(scheduler: Any) -> tuple[TimestepSampling, Any]:
    """Our sampler, and a diffusers scheduler."""
    return TimestepSampling(scheduler), type(scheduler).from_config(scheduler.config)


def step_as_the_pipeline(scheduler: Any, prediction: Tensor, timestep: Tensor, latents: Tensor, generator: Any) -> Any:
    extra = {} if isinstance(scheduler, PNDMScheduler) else {"generator": generator}
    return scheduler.step(prediction, timestep, latents, **extra, return_dict=False)[0]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=name_of)
@pytest.mark.parametrize(
    ("steps", "left_out", "dtype"), [(2, 0, torch.float32), (8, 0, torch.bfloat16), (8, 3, torch.float32)]
)
def test_the_trajectory_equals_the_schedulers(scheduler: Any, steps: int, left_out: int, dtype: torch.dtype) -> None:
    """Every latent, model input and noised template on the way, with steps of other requests in between."""
    sampling, theirs = make(scheduler)
    theirs.set_timesteps(steps)
    if hasattr(theirs, "set_begin_index"):
        theirs.set_begin_index(left_out)
    left = theirs.timesteps[left_out:]
    own, generator = (torch.Generator().manual_seed(7) for _ in range(2))
    run = sampling.run(steps, steps - left_out)
    levels, state = sampling.noise_levels(run), sampling.begin(run, own)
    clean, noise = torch.randn(SHAPE).to(dtype), torch.randn(SHAPE).to(dtype)
    latents = expected = theirs.add_noise(clean, noise, left[:1])
    assert torch.equal(sampling.noised(clean, noise, run, 0), expected)
    assert torch.equal(sampling.pure_noise(noise, run), noise * theirs.init_noise_sigma)
    torch.testing.assert_close(levels[:-1] * 1000, left.float())
    assert levels[-1] == 0
    for step, timestep in enumerate(left):
        scaled = theirs.scale_model_input(expected, timestep)
        assert torch.equal(sampling.scaled(latents, run, step), scaled)
        prediction = torch.randn(SHAPE).to(dtype)
        expected = step_as_the_pipeline(theirs, prediction, timestep, expected, generator)
        sampling.noise_levels(sampling.run(steps + 1, steps + 1))
        latents, state = sampling.step(latents, prediction, state, step)
        assert latents.dtype == expected.dtype == dtype
        assert torch.equal(latents, expected)
        after = clean if step == len(left) - 1 else theirs.add_noise(clean, noise, left[step + 1 : step + 2])
        assert torch.equal(sampling.noised(clean, noise, run, step + 1), after)


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=name_of)
def test_a_step_can_be_repeated(scheduler: Any) -> None:
    """A step does not change its inputs."""
    sampling, _ = make(scheduler)
    run = sampling.run(5, 5)
    state, latents = sampling.begin(run, torch.Generator().manual_seed(0)), torch.randn(SHAPE)
    for step in range(len(sampling.noise_levels(run)) - 1):
        prediction, kept = torch.randn(SHAPE), [tensor.clone() for tensor in (latents, *state)]
        first, after = sampling.step(latents, prediction, state, step)
        second, _ = sampling.step(latents, prediction, state, step)
        assert torch.equal(first, second)
        assert all(map(torch.equal, kept, (latents, *state)))
        latents, state = first, after


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=name_of)
@pytest.mark.parametrize("left_out", [0, 2])
def test_number_of_steps_is_known_beforehand(scheduler: Any, left_out: int) -> None:
    """The scheduler computes it from a few numbers about the sampler; and the fewest steps are finite."""
    sampling = TimestepSampling(scheduler)
    model = msgspec.structs.replace(MODEL, solver_order=sampling.order, extra_steps=sampling.extra_steps)
    levels = sampling.noise_levels(sampling.run(5, 5 - left_out))
    assert model.num_steps(SamplingParams(num_inference_steps=5, strength=1 - left_out / 5)) == len(levels) - 1
    fewest = sampling.noise_levels(sampling.run(sampling.min_steps, sampling.min_steps))
    assert model.num_steps(SamplingParams(num_inference_steps=sampling.min_steps)) == len(fewest) - 1
    assert (sampling.extra_steps, sampling.min_steps) == ((1, 2) if isinstance(scheduler, PNDMScheduler) else (0, 1))


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=name_of)
def test_clean_prediction_inverts_the_noising(scheduler: Any) -> None:
    """Given the noise itself, or the velocity that scheduler and clean latents make of it."""
    sampling = TimestepSampling(scheduler)
    run = sampling.run(8, 6)
    clean, noise = torch.randn(SHAPE, dtype=torch.double), torch.randn(SHAPE, dtype=torch.double)
    for step, level in enumerate(sampling.noise_levels(run)[:-1]):
        latents, prediction = sampling.noised(clean, noise, run, step), noise
        if scheduler.config.prediction_type == "v_prediction":
            # Scaled for the model, latents are signal * clean + noise_share * noise, whose squares sum to 1.
            scale = (sampling.scaled(latents, run, step) / latents).mean()
            signal = scale * (sampling.noised(clean, 0 * noise, run, step) / clean).mean()
            prediction = signal * noise - (1 - signal**2).sqrt() * clean
        found = sampling.clean(latents, prediction, run, step)
        torch.testing.assert_close(found, clean, atol=2e-3, rtol=0, msg=f"at noise level {level}")


@pytest.mark.parametrize(
    ("scheduler", "reason"),
    [
        (DDIMScheduler(prediction_type="sample"), "DDIMScheduler with prediction_type sample"),
        (PNDMScheduler(), "PNDMScheduler with skip_prk_steps off"),
    ],
)
def test_unsupported_options_are_named(scheduler: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TimestepSampling(scheduler)


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=name_of)
def test_a_run_can_go_on_from_its_latents_alone_unless_the_sampler_remembers_steps(scheduler: Any) -> None:
    sampling, _ = make(scheduler)

    def rest_of(latents: Tensor, first: int, kept: int) -> tuple[Tensor, Tensor]:
        """The latents after so many of the last steps of 8, without the first ones, and after all of them."""
        run, after = sampling.run(8, 8 - first), latents
        state = sampling.begin(run, torch.Generator("cpu").manual_seed(0))
        for step in range(len(sampling.noise_levels(run)) - 1):
            after = latents if step == kept else after
            latents, state = sampling.step(latents, latents.sin(), state, step)
        return after, latents

    after, expected = rest_of(torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)), 0, 4)
    _, found = rest_of(after, 4, 0)
    if not sampling.extra_steps:  # of which such runs have too many
        assert torch.equal(found, expected) == (not sampling.remembers_steps)
