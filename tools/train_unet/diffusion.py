"""The UNet's training objective: from noised pictures predict the velocity, with most weight on masked pixels."""

from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, DDIMScheduler
from torch import Tensor

from tools.train_embedded.flow import weighted_error
from tools.train_embedded.layout import unpack
from tools.train_embedded.pool import Batch
from tools.train_unet.models import Models


@dataclass(frozen=True)
class Noised:
    """A batch with noise added."""

    hidden: Tensor  # [batch, 33, 32, 32]: noised latents, mask, masked latents; as StableDiffusionInpaintPipeline
    velocity: Tensor  # [batch, 16, 32, 32]
    timestep: Tensor  # [batch]
    inside: Tensor  # [batch, 32, 32]: 1 where a latent holds a masked pixel


def noise_batch(batch: Batch, shift: float, scheduler: DDIMScheduler) -> Noised:
    """Add noise of random strength. shift: added to the pool's centred latents; StableDiffusionInpaintPipeline does not
    centre them.
    """
    target, masked = unpack(batch.target) + shift, unpack(batch.masked) + shift
    pixels = unpack(batch.mask)  # [batch, 64 of a latent, 32, 32]
    timestep = torch.randint(scheduler.config.num_train_timesteps, (len(target),))
    noise = torch.randn_like(target)
    noisy = scheduler.add_noise(target, noise, timestep)
    hidden = torch.cat([noisy, pixels[:, :1], masked], dim=1)  # a latent's first mask pixel: nearest interpolation
    return Noised(hidden, scheduler.get_velocity(target, noise, timestep), timestep, pixels.amax(1))


def shift_of(vae: AutoencoderKL) -> float:
    return float((vae.config.shift_factor or 0.0) * vae.config.scaling_factor)


def predict(models: Models, noised: Noised, clip_ids: Tensor) -> Tensor:
    """The UNet's velocity, [batch, 16, 32, 32] float32."""
    with torch.autocast("cpu", torch.bfloat16):
        words = models.clip(clip_ids).last_hidden_state
        hidden = noised.hidden.contiguous(memory_format=torch.channels_last)
        predicted: Tensor = models.unet(hidden, noised.timestep, words, return_dict=False)[0]
    return predicted.float()


def error(predicted: Tensor, noised: Noised) -> tuple[Tensor, Tensor]:
    """The loss, and the mean squared error under the mask."""
    given, wanted = (x.flatten(2).transpose(1, 2) for x in (predicted, noised.velocity))
    return weighted_error(given, wanted, noised.inside.flatten(1))
