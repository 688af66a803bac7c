"""Flow-matching Euler sampling, on named tensors instead of a stateful scheduler object.

A request's sampler state is `latents` and `sigmas` plus its step number: it can move between processes and requests
with different step counts share a batch. The noise levels themselves come from the checkpoint's own scheduler class;
one step follows `FlowMatchEulerDiscreteScheduler.step`, casts included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor


def make_sigmas(scheduler: Any, num_inference_steps: int, strength: float, image_tokens: int) -> Tensor:
    """Noise levels of a run, as FluxFillPipeline asks its scheduler for them: float32 [steps + 1], falling to 0.

    With strength < 1 the first steps are left out: `steps` is then num_inference_steps - skipped_steps(...).
    """
    sigmas = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
    scheduler.set_timesteps(sigmas=sigmas, mu=_shift(scheduler.config, image_tokens))
    result: Tensor = scheduler.sigmas[skipped_steps(num_inference_steps, strength) :]
    return result.clone()


def skipped_steps(num_inference_steps: int, strength: float) -> int:
    """How many leading steps `strength` leaves out; FluxFillPipeline.get_timesteps."""
    return int(max(num_inference_steps - min(num_inference_steps * strength, num_inference_steps), 0))


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
