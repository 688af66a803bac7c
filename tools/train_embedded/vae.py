"""Stage `vae`: trains the autoencoder between 256x256 RGB pictures and 32x32 latents of 16 channels.

Uses Muon for the convolutions, and starts with a zero second convolution in every residual block: with AdamW and the
default initialisation the PSNR stalled at 17.6 dB.
"""

import math
import random
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from tools.train_embedded import seeds
from tools.train_embedded.drawers import Drawers
from tools.train_embedded.muon import Muon
from tools.train_embedded.ranks import average_gradients, launch
from tools.train_embedded.scenes import Pixels, draw_scene, render
from tools.train_embedded.training import Average, Clock, load, precision, save, set_rate

CHANNELS = (16, 32, 64, 64)
LATENTS = 16
RATE = 3e-3
CROP = 128  # pixels; of every four batches three are crops, until the last tenth of training
POOL = 2500  # scenes kept in memory
SAVE_EVERY = 90.0  # seconds


def build_vae() -> AutoencoderKL:
    vae = AutoencoderKL(
        block_out_channels=CHANNELS,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=LATENTS,
        norm_num_groups=8,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
        sample_size=256,
    )
    for module in vae.modules():
        if isinstance(module, ResnetBlock2D):
            nn.init.zeros_(module.conv2.weight)
            nn.init.zeros_(module.conv2.bias)
    with torch.no_grad():  # start with little posterior noise
        vae.encoder.conv_out.bias[LATENTS:] = -5
        vae.encoder.conv_out.weight[LATENTS:] *= 0.1
    return vae


def optimisers_of(vae: nn.Module, rate: float = RATE) -> list[torch.optim.Optimizer]:
    """Of an autoencoder or its decoder."""
    inner = [
        param
        for name, param in vae.named_parameters()
        if param.ndim == 4 and "conv_out" not in name and "encoder.conv_in" not in name
    ]
    taken = {id(param) for param in inner}
    outer = [param for param in vae.parameters() if id(param) not in taken]
    return [Muon(inner, lr=rate), torch.optim.AdamW(outer, lr=rate, betas=(0.9, 0.99), weight_decay=0.0)]


def scene_image(seed: int) -> Pixels:
    """[256, 256, 3]."""
    return render(draw_scene(seed)).image


class Pictures:
    """A pool of scenes in memory. At POOL scenes, a new one replaces a random one."""

    def __init__(self, first_seed: int, processes: int = 0) -> None:
        self.drawn = 0
        self._rng = random.Random(first_seed)
        self._drawers = Drawers(scene_image, first_seed, processes)
        self._pool: list[Tensor] = []

    def grow(self, number: int) -> None:
        """Add at least `number` pictures."""
        wanted = self.drawn + number
        while self.drawn < wanted:
            for pixels in self._drawers.take():
                image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
                self.drawn += 1
                if len(self._pool) < POOL:
                    self._pool.append(image)
                else:
                    self._pool[self._rng.randrange(POOL)] = image

    def grow_if_ready(self) -> None:
        if self._drawers.ready:
            self.grow(1)

    def close(self) -> None:
        self._drawers.close()

    def batch(self, whole: bool) -> Tensor:
        """[1, 3, 256, 256] or [4, 3, CROP, CROP] in -1..1, sometimes mirrored, sometimes with a rectangle of zeros, as
        FLUX Fill encodes pictures whose masked part is zero.
        """
        rng = self._rng
        chosen = [rng.choice(self._pool) for _ in range(1 if whole else 4)]
        if not whole:
            corners = [(rng.randrange(256 - CROP + 1), rng.randrange(256 - CROP + 1)) for _ in chosen]
            chosen = [x[:, a : a + CROP, b : b + CROP] for x, (a, b) in zip(chosen, corners, strict=True)]
        x = torch.stack(chosen).float() / 127.5 - 1
        if rng.random() < 0.5:
            x = x.flip(3)
        if rng.random() < 0.35:
            side = x.shape[-1]
            a, b, h, w = rng.randrange(side), rng.randrange(side), rng.randrange(16, side), rng.randrange(16, side)
            x[: max(1, len(x) // 2), :, a : a + h, b : b + w] = 0
        return x


def vae_loss(vae: AutoencoderKL, x: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the mean squared error that it contains."""
    with precision(x.device):
        posterior = vae.encode(x).latent_dist
        y = vae.decode(posterior.sample()).sample
    mean, log_variance = posterior.mean.float(), posterior.logvar.float()
    divergence = 0.5 * (mean * mean + log_variance.exp() - 1 - log_variance).mean()
    error = y.float() - x
    across = (error[..., 1:] - error[..., :-1]).abs().mean()
    down = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    square = (error * error).mean()
    return error.abs().mean() + 0.5 * (across + down) + square + 5e-4 * divergence, square.detach()


def held_out_images(number: int) -> Tensor:
    """[number, 3, 256, 256] in -1..1."""
    images = np.stack([scene_image(seeds.VAE_HELD_OUT + i) for i in range(number)])
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


@torch.no_grad()
def round_trip_psnr(vae: AutoencoderKL, images: Tensor) -> float:
    """Mean over images of the PSNR in dB after encoding and decoding in the weights' dtype."""
    values = []
    for x in images.split(4):
        latents = vae.encode(x.to(vae.dtype)).latent_dist.mode()
        error = vae.decode(latents).sample.float().clamp(-1, 1) - x
        values.append(10 * torch.log10(4 / (error * error).mean((1, 2, 3))))
    return float(torch.cat(values).mean())


@torch.no_grad()
def latent_moments(vae: AutoencoderKL, images: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of the latents, to normalise them by the checkpoint's shift and scale."""
    latents = torch.cat([vae.encode(x).latent_dist.mode() for x in images.split(4)])
    return float(latents.mean()), float(latents.std())


def train_vae(work: Path, budget: float, ranks: int) -> None:
    """Train for `budget` seconds, earlier runs included; resumes from `work`, writes `work/vae` in diffusers layout."""
    launch(ranks, lambda rank, number: _train(work, budget, rank, number))


def _train(work: Path, budget: float, rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    vae, state = build_vae(), load(work / "vae.pt")
    optimisers, average, step, drawn = optimisers_of(vae), Average({"vae": vae}), 0, 0
    clock, params = Clock(budget), list(vae.parameters())
    if state is not None:
        vae.load_state_dict(state["vae"])
        average.weights, step, clock.spent, drawn = state["average"], state["step"], state["spent"], state["drawn"]
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
    torch.manual_seed(1000 * step + rank)
    pictures = Pictures(seeds.VAE_TRAIN + rank * 1_000_000 + drawn)
    pictures.grow(200)
    clock.tick()
    saved_at, squares, share = time.monotonic(), [0.0], clock.spent / budget

    def keep() -> None:
        if rank == 0:
            save(work / "vae.pt", _state(vae, average, optimisers, step, clock.spent, drawn + pictures.drawn))

    while share < 1:
        rate = RATE * min(1.0, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * share)) + 1e-5
        set_rate(optimisers, rate)
        if step % 3 == 0:
            pictures.grow(1)
        loss, square = vae_loss(vae, pictures.batch(whole=step % 4 == 0 or share > 0.9))
        vae.zero_grad()
        loss.backward()
        share = average_gradients(params, clock.tick())
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        for optimiser in optimisers:
            optimiser.step()
        average.update(min(0.995, (1 + step) / (10 + step)))
        squares.append(float(square))
        step += 1
        if step % 100 == 0 and rank == 0:
            psnr = 10 * math.log10(4 / np.mean(squares[-100:]))
            print(f"vae {clock.spent:.0f}s step {step} psnr {psnr:.2f} rate {rate:.5f}", flush=True)
        if time.monotonic() - saved_at > SAVE_EVERY:
            keep()
            saved_at = time.monotonic()
    keep()
    pictures.close()
    if rank == 0:
        average.copy_to({"vae": vae})
        export_vae(vae.eval(), work / "vae")


def _state(
    vae: AutoencoderKL,
    average: Average,
    optimisers: list[torch.optim.Optimizer],
    step: int,
    spent: float,
    drawn: int,
) -> dict[str, Any]:
    return {
        "vae": vae.state_dict(), "average": average.weights, "optimisers": [o.state_dict() for o in optimisers],
        "step": step, "spent": spent, "drawn": drawn,
    }  # fmt: skip


def export_vae(vae: AutoencoderKL, folder: Path) -> None:
    """Set the latents' shift and scale, report the held-out PSNR, save in diffusers layout."""
    held_out = held_out_images(48)
    mean, deviation = latent_moments(vae, held_out)
    vae.register_to_config(shift_factor=mean, scaling_factor=1 / deviation)
    print(f"vae held-out psnr {round_trip_psnr(vae, held_out):.2f} dB, shift {mean:.4f}, scale {1 / deviation:.4f}")
    vae.save_pretrained(folder)


def load_vae(folder: Path) -> AutoencoderKL:
    return cast(AutoencoderKL, AutoencoderKL.from_pretrained(folder).eval().requires_grad_(False))
