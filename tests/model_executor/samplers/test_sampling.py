"""Noise levels and steps against diffusers' own schedulers, bit for bit."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux_fill import calculate_shift
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_heun_discrete import FlowMatchHeunDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_lcm import FlowMatchLCMScheduler
from fakes import MODEL
from torch.utils._python_dispatch import TorchDispatchMode

from core.sampling_params import SamplingParams
from model_executor.samplers.sampling import Sampling, dynamic_shift, predict_clean

SCHEDULERS: list[Any] = [
    FlowMatchEulerDiscreteScheduler(),
    FlowMatchEulerDiscreteScheduler(shift=3.0),
    FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, max_shift=1.3, base_image_seq_len=64, shift_terminal=0.1
    ),
    FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
    FlowMatchEulerDiscreteScheduler(stochastic_sampling=True, shift=3.0),
    FlowMatchLCMScheduler(),
    FlowMatchHeunDiscreteScheduler(shift=3.0),
]
TOKENS = 60


def timesteps(sampling: Sampling, steps: int) -> dict[str, Any]:
    """The arguments that FLUX's pipelines pass to a scheduler; for schedulers without custom noise levels, those of
    SD3's.
    """
    if not sampling.takes_sigmas:
        return {"num_inference_steps": steps}
    return {"sigmas": np.linspace(1.0, 1 / steps, steps), "mu": dynamic_shift(sampling.config, TOKENS)}


def make(scheduler: Any) -> tuple[Sampling, Any]:
    """Our sampler, and a diffusers scheduler."""
    own = type(scheduler).from_config(scheduler.config)
    return Sampling(scheduler), own


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("steps", "left_out"), [(2, 0), (8, 0), (8, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trajectory_equals_the_schedulers(scheduler: Any, steps: int, left_out: int, dtype: torch.dtype) -> None:
    """Every latent and every noised template on the way, with steps of other requests in between."""
    sampling, theirs = make(scheduler)
    theirs.set_timesteps(**timesteps(sampling, steps))
    theirs.set_begin_index(left_out * theirs.order)
    sigmas = sampling.schedule(steps, steps - left_out, timesteps(sampling, steps))
    own, generator = (torch.Generator().manual_seed(7) for _ in range(2))
    state = sampling.begin(own)
    clean, noise = torch.randn(1, TOKENS, 64).to(dtype), torch.randn(1, TOKENS, 64).to(dtype)
    left = theirs.timesteps[left_out * theirs.order :]
    latents = expected = theirs.scale_noise(clean, left[:1], noise)
    assert torch.equal(sampling.noised(clean, noise, sigmas, 0), expected)
    assert len(sigmas) == len(left) + 1
    for step, timestep in enumerate(left):
        velocity = torch.randn(1, TOKENS, 64).to(dtype)
        expected = theirs.step(velocity, timestep, expected, generator=generator, return_dict=False)[0]
        sampling.schedule(steps + 1, steps + 1, timesteps(sampling, steps + 1))
        latents, state = sampling.step(latents, velocity, sigmas, step, state)
        assert latents.dtype == dtype
        assert torch.equal(latents, expected)
        if step < len(left) - 1:
            noised = theirs.scale_noise(clean, left[step + 1 : step + 2], noise)
            assert torch.equal(sampling.noised(clean, noise, sigmas, step + 1), noised)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_shift_takes_the_place_of_all_that_the_scheduler_does(scheduler: Any) -> None:
    """For one run; noise levels that it makes of these, such as Karras', are made of the shifted ones."""
    sampling, _ = make(scheduler)
    static = {} if "Heun" in sampling.name else {"use_dynamic_shifting": False, "shift_terminal": None}
    theirs = type(scheduler).from_config(scheduler.config, shift=2.5, **static)
    before = sampling.schedule(4, 4, timesteps(sampling, 4))
    theirs.set_timesteps(**timesteps(sampling, 4))
    assert torch.equal(sampling.schedule(4, 4, timesteps(sampling, 4), shift=2.5), theirs.sigmas)
    assert torch.equal(sampling.schedule(4, 4, timesteps(sampling, 4)), before)


class Uploads(TorchDispatchMode):
    """Counts what would be uploaded to a GPU: indices that are given as a list, and numbers as a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.index.Tensor, torch.ops.aten.lift_fresh.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_step_uploads_nothing(scheduler: Any) -> None:
    """An upload waits for all that a GPU has to do."""
    sampling, theirs = make(scheduler)
    sigmas, clean, noise = sampling.schedule(4, 4, timesteps(sampling, 4)), torch.ones(1, 6, 4), torch.zeros(1, 6, 4)
    state = sampling.begin(torch.Generator())
    with Uploads() as uploads:
        sampling.step(clean, noise, sigmas, 0, state)
        sampling.noised(clean, noise, sigmas, 1)
    assert not uploads.count
    if "Heun" not in type(scheduler).__name__:
        theirs.set_timesteps(**timesteps(sampling, 4))
        theirs.set_begin_index(0)
        with Uploads() as uploads:
            theirs.scale_noise(clean, theirs.timesteps[:1], noise)
        assert uploads.count, "diffusers uploads nothing any more: the wrapper of noise levels is of no use"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_step_can_be_repeated(scheduler: Any) -> None:
    """A step does not change its inputs."""
    sampling, _ = make(scheduler)
    sigmas = sampling.schedule(4, 4, timesteps(sampling, 4))
    state, latents = sampling.begin(torch.Generator().manual_seed(0)), torch.randn(TOKENS, 64)
    for step in range(len(sigmas) - 1):
        velocity = torch.randn(TOKENS, 64)
        before = latents.clone()
        first, state_after = sampling.step(latents, velocity, sigmas, step, state)
        second, _ = sampling.step(latents, velocity, sigmas, step, state)
        assert torch.equal(first, second)
        assert torch.equal(latents, before)
        latents, state = first, state_after


@pytest.mark.parametrize(("steps", "strength", "skipped"), [(8, 1.0, 0), (8, 0.5, 4), (10, 0.35, 6), (3, 0.99, 0)])
def test_strength_leaves_out_leading_steps(steps: int, strength: float, skipped: int) -> None:
    params = SamplingParams(num_inference_steps=steps, strength=strength)
    assert params.num_denoising_steps == steps - skipped
    sampling = Sampling(FlowMatchEulerDiscreteScheduler())
    whole = sampling.schedule(steps, steps, timesteps(sampling, steps))
    part = sampling.schedule(steps, params.num_denoising_steps, timesteps(sampling, steps))
    assert torch.equal(part, whole[skipped:])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("strength", [1.0, 0.6])
def test_number_of_steps_is_known_beforehand(scheduler: Any, strength: float) -> None:
    """The scheduler computes it from the solver's order."""
    sampling = Sampling(scheduler)
    params = SamplingParams(num_inference_steps=5, strength=strength)
    sigmas = sampling.schedule(5, params.num_denoising_steps, timesteps(sampling, 5))
    model = msgspec.structs.replace(MODEL, solver_order=sampling.order)
    assert model.num_steps(params) == len(sigmas) - 1


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_minimum_of_steps_works_and_fewer_fail(scheduler: Any) -> None:
    sampling = Sampling(scheduler)
    fewest = sampling.min_steps
    assert sampling.schedule(fewest, fewest, timesteps(sampling, fewest)).isfinite().all()
    with np.errstate(invalid="ignore"):
        one = sampling.schedule(1, 1, timesteps(sampling, 1))
    assert (fewest == 1) == bool(one.isfinite().all())


@pytest.mark.parametrize("config", [{}, {"max_shift": 1.3, "base_image_seq_len": 64}])
def test_dynamic_shift_is_diffusers(config: dict[str, Any]) -> None:
    config = dict(FlowMatchEulerDiscreteScheduler(**config).config)
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    assert dynamic_shift(config, TOKENS) == calculate_shift(TOKENS, *(config[name] for name in names))


def test_sigmas_do_not_share_the_schedulers_state() -> None:
    """The next request's schedule must not change one in use."""
    sampling = Sampling(FlowMatchEulerDiscreteScheduler())
    first = sampling.schedule(4, 4, timesteps(sampling, 4))
    kept = first.clone()
    sampling.schedule(9, 9, timesteps(sampling, 9)).zero_()
    assert torch.equal(first, kept)


def test_clean_prediction_inverts_the_noising() -> None:
    clean, noise, sigma = torch.randn(5, 64), torch.randn(5, 64), torch.tensor(0.7)
    latents = (1 - sigma) * clean + sigma * noise
    torch.testing.assert_close(predict_clean(latents, noise - clean, sigma), clean)


def test_a_sampler_remembers_steps_if_it_draws_noise_or_takes_two_for_one() -> None:
    found = {type(each).__name__: make(each)[0].remembers_steps for each in SCHEDULERS}
    assert found["FlowMatchLCMScheduler"]
    assert found["FlowMatchHeunDiscreteScheduler"]
    assert not make(FlowMatchEulerDiscreteScheduler())[0].remembers_steps
