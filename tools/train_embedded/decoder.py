"""Stage `decoder`: trains the autoencoder's decoder longer. The encoder stays as it is, so latents stay valid and the
denoiser need not be trained again.

It sees whole pictures only: the group norms average over the picture, so a decoder that learnt from crops is a little
off in the brightness of large areas. A term of the loss is the error of 8x8 means, which show as a tint.
"""

import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from tools.train_embedded import seeds
from tools.train_embedded.drawers import spare_processes
from tools.train_embedded.ranks import average_gradients, launch
from tools.train_embedded.training import Average, Clock, load, precision, save, set_rate, training_device
from tools.train_embedded.vae import Pictures, held_out_images, load_vae, optimisers_of, round_trip_psnr

RATE = 8e-4
BATCH, GPU_BATCH = 2, 32  # pictures per rank
TINT = 8  # pixels: side of the squares whose means are compared
TINT_WEIGHT = 1.0
SAVE_EVERY = 120.0  # seconds
REPORT_EVERY = 50  # steps


def decoder_loss(vae: AutoencoderKL, x: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of pictures [batch, 3, 256, 256] in -1..1, and the mean squared error that it contains."""
    with precision(x.device):
        with torch.no_grad():
            latents = vae.encode(x).latent_dist.sample()
        y = vae.decode(latents).sample
    error = y.float() - x
    across = (error[..., 1:] - error[..., :-1]).abs().mean()
    down = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    square = (error * error).mean()
    tint = F.avg_pool2d(error, TINT).abs().mean()
    return error.abs().mean() + 0.5 * (across + down) + square + TINT_WEIGHT * tint, square.detach()


def train_decoder(work: Path, budget: float, ranks: int) -> None:
    """Train for `budget` seconds, earlier runs included; resumes from `work`, starts from `work/vae` and overwrites it
    at the end.
    """
    launch(ranks, lambda rank, number: _train(work, budget, rank, number))


def _train(work: Path, budget: float, rank: int, ranks: int) -> None:
    vae, state = load_vae(work / "vae").to(training_device()), load(work / "decoder.pt")
    decoder = vae.decoder.requires_grad_(True)
    optimisers, average = optimisers_of(decoder, RATE), Average({"decoder": decoder})
    clock, params, step, drawn = Clock(budget), list(decoder.parameters()), 0, 0
    if state is not None:
        decoder.load_state_dict(state["decoder"])
        average.load(state["average"])
        step, clock.spent, drawn = state["step"], state["spent"], state["drawn"]
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
    torch.manual_seed(1000 * step + rank)
    on_gpu = vae.device.type == "cuda"
    pictures = Pictures(seeds.DECODER_TRAIN + rank * 1_000_000 + drawn, spare_processes(on_gpu))
    pictures.grow(100)
    clock.tick()
    saved_at, squares, share = time.monotonic(), [0.0], clock.spent / budget

    def keep() -> None:
        if rank == 0:
            progress = {"step": step, "spent": clock.spent, "drawn": drawn + pictures.drawn}
            weights = {"decoder": decoder.state_dict(), "average": average.weights}
            save(work / "decoder.pt", {**weights, **progress, "optimisers": [o.state_dict() for o in optimisers]})

    while share < 1:
        set_rate(optimisers, RATE * min(1.0, (step + 1) / 30) * (0.5 + 0.5 * math.cos(math.pi * share)) + 1e-5)
        if on_gpu:
            pictures.grow_if_ready()
        else:
            pictures.grow(1)
        x = torch.cat([pictures.batch(whole=True) for _ in range(GPU_BATCH if on_gpu else BATCH)]).to(vae.device)
        loss, square = decoder_loss(vae, x)
        decoder.zero_grad()
        loss.backward()
        share = average_gradients(params, clock.tick())
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        for optimiser in optimisers:
            optimiser.step()
        average.update(min(0.99, (1 + step) / (10 + step)))
        squares.append(float(square))
        step += 1
        if step % REPORT_EVERY == 0 and rank == 0:
            psnr = 10 * math.log10(4 / np.mean(squares[-REPORT_EVERY:]))
            print(f"decoder {clock.spent:.0f}s step {step} psnr {psnr:.2f}", flush=True)
        if time.monotonic() - saved_at > SAVE_EVERY:
            keep()
            saved_at = time.monotonic()
    keep()
    pictures.close()
    if rank == 0:
        average.copy_to({"decoder": decoder})
        vae = vae.cpu().eval()
        print(f"decoder held-out psnr {round_trip_psnr(vae, held_out_images(48)):.2f} dB", flush=True)
        vae.save_pretrained(work / "vae")
