"""Stage `train`: trains the UNet and its text encoder together, in one process; can be resumed."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tools.train_embedded import seeds
from tools.train_embedded.flow import UNCONDITIONAL
from tools.train_embedded.masks import MORE_BOXES
from tools.train_embedded.muon import Muon
from tools.train_embedded.pool import Batch, Pool
from tools.train_embedded.training import Average, Clock, load, load_state, save, set_rate, state_of
from tools.train_unet.diffusion import error, noise_batch, predict, shift_of
from tools.train_unet.models import Models, Sizes, build_models, build_scheduler, embedded_tokenizers, embedded_vae

CHECKPOINT = "unet.pt"
SIZES = Sizes()


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters. Shares are of the time budget."""

    sizes: Sizes = SIZES
    rate: float = 1.5e-3
    batch: int = 16
    warmup: int = 60  # steps
    decay_from: float = 0.4  # share after which the rate falls linearly
    reuse: float = 4.0  # times an example is shown, on average
    average: float = 0.995  # decay of the weights' average, applied every 4th step
    warm_pool: int = 960  # examples drawn before the first step
    pool: str = "boxes0"  # its folder
    save_every: float = 300.0  # seconds
    report_every: int = 25  # steps


def optimisers_of(models: Models, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices and convolutions except input, output and time embedding; AdamW for the rest."""
    inner: list[nn.Parameter] = []
    outer = list(models.clip.parameters())
    for name, parameter in models.unet.named_parameters():
        is_inner = parameter.ndim >= 2 and not name.startswith(("conv_in", "conv_out", "time_embedding"))
        (inner if is_inner else outer).append(parameter)
    return [
        Muon(inner, lr=rate, weight_decay=0.01),
        torch.optim.AdamW(outer, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


class Trainer:
    """The training loop and its state on disk."""

    def __init__(self, recipe: Recipe, work: Path, budget: float) -> None:
        """budget: seconds, those of earlier runs included."""
        self.recipe, self._path = recipe, work / CHECKPOINT
        self.clock, self.step, self.shown = Clock(budget), 0, 0
        tokenizers, vae = embedded_tokenizers(), embedded_vae()
        self.models, self._scheduler, self._shift = build_models(recipe.sizes), build_scheduler(), shift_of(vae)
        self.optimisers = optimisers_of(self.models, recipe.rate)
        self._average = Average(self.models.named())
        self.pool = Pool(work / recipe.pool, vae, tokenizers, seeds.BOXES_TRAIN, MORE_BOXES)
        self._empty = tokenizers([""])[0]
        if (state := load(self._path)) is not None:
            self._resume(state)
        torch.manual_seed(1000 + self.step)

    def _resume(self, state: dict[str, Any]) -> None:
        for name, module in self.models.named().items():
            load_state(module, state["models"][name])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self._average.weights = state["average"]
        self.step, self.shown, self.clock.spent = state["step"], state["shown"], state["spent"]

    def keep(self) -> None:
        state = {
            "models": {name: state_of(module) for name, module in self.models.named().items()},
            "average": self._average.weights,
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "sizes": self.recipe.sizes,
        }
        save(self._path, state | {"step": self.step, "shown": self.shown, "spent": self.clock.spent})

    def train(self) -> None:
        """Train until the time budget is spent."""
        self._fill()
        self._report(f"pool {self.pool.drawn}, resuming at step {self.step}")
        share, errors = self.clock.tick(), list[float]()
        saved_at = reported_at = time.monotonic()
        while share < 1:
            set_rate(self.optimisers, self._rate(share))
            errors.append(self.learn(self.pool.batch(self.recipe.batch)))
            self._fill()
            share, now = self.clock.tick(), time.monotonic()
            if len(errors) == self.recipe.report_every:
                mean, speed = sum(errors) / len(errors), (now - reported_at) / len(errors)
                self._report(f"step {self.step} masked error {mean:.4f}, {speed:.2f} s a step")
                errors, reported_at = [], now
            if now - saved_at > self.recipe.save_every:
                self.keep()
                saved_at = now
        self.keep()

    def learn(self, batch: Batch) -> float:
        """Run one training step; returns the mean squared error under the masks."""
        loss, masked = self._loss(batch)
        for parameter in self.models.parameters():
            parameter.grad = None
        loss.backward()
        nn.utils.clip_grad_norm_(self.models.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        self.shown += len(batch.clip)
        if self.step % 4 == 0:
            turn = self.step / 4
            self._average.update(min(self.recipe.average, (1 + turn) / (10 + turn)))
        return float(masked)

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        dropped = torch.rand(len(batch.clip)) < UNCONDITIONAL
        clip_ids = torch.where(dropped[:, None], self._empty, batch.clip)
        noised = noise_batch(batch, self._shift, self._scheduler)
        return error(predict(self.models, noised, clip_ids), noised)

    def _rate(self, share: float) -> float:
        recipe = self.recipe
        fall = min(1.0, max(0.02, (1 - share) / (1 - recipe.decay_from)))
        return recipe.rate * min(1.0, (self.step + 1) / recipe.warmup) * fall

    def _fill(self) -> None:
        """Draw new examples so that each is shown `reuse` times on average."""
        while self.pool.drawn < max(self.recipe.warm_pool, self.shown / self.recipe.reuse):
            self.pool.grow()

    def _report(self, line: str) -> None:
        print(f"{self.clock.spent:.0f}s {line}", flush=True)
