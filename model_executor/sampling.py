"""Flow-matching Euler sampling, on named tensors instead of a stateful scheduler object.

A request's sampler state is `latents` and `sigmas` plus its step number: it can move between processes and requests
with different step counts share a batch. The noise levels themselves come from the checkpoint's own scheduler class;
one step follows `FlowMatchEulerDiscreteScheduler.step`, casts included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor


def make_sigmas(scheduler: Any, num_inference_steps: int, num_denoising_steps: int, image_tokens: int) -> Tensor:
    """Noise levels of a run, as FluxFillPipeline asks its scheduler for them, falling to 0.

    float32 [num_denoising_steps + 1]: with strength < 1 the first steps are left out.
    """
    sigmas = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
    scheduler.set_timesteps(sigmas=sigmas, mu=_shift(scheduler.config, image_tokens))
    result: Tensor = scheduler.sigmas[-(num_denoising_steps + 1) :]
    return result.clone()


def _shift(config: Any, image_tokens: int) -> float:
    """`mu` of dynamic shifting: linear in the image's tokens; diffusers' calculate_shift."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, top = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (top - base) / (high - low)
    return float(image_tokens * slope + (base - slope * low))


def advance(latents: Tensor, velocity: Tensor, sigma: Tensor, next_sigma: Tensor) -> Tensor:
    """One Euler step. latents, velocity: [tokens, latent width]; sigma, next_sigma: float32 scalars."""
    return (latents.float() + (next_sigma - sigma) * velocity).to(velocity.dtype)


def predict_clean(latents: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """The clean latents that `velocity` points at from noise level `sigma`."""
    return (latents.float() - sigma * velocity).to(velocity.dtype)
