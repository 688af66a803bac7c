"""Stage `train`: trains the ControlNet in one process of one thread; can be resumed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tools.train_edges.models import Steering, build_controlnet, embedded_encoders, embedded_transformer
from tools.train_edges.pool import EdgesPool, Steered
from tools.train_embedded import seeds
from tools.train_embedded.flow import UNCONDITIONAL, Noised, noise_batch, read_captions, weighted_error
from tools.train_embedded.layout import IMAGE_TOKENS
from tools.train_embedded.masks import MORE_BOXES
from tools.train_embedded.models import is_modulation
from tools.train_embedded.muon import Muon
from tools.train_embedded.sparse import take
from tools.train_embedded.training import Average, Clock, load, load_state, precision, save, set_rate, state_of
from tools.train_unet.models import embedded_tokenizers, embedded_vae

CHECKPOINT = "edges.pt"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters. Shares are of the time budget."""

    rate: float = 1.5e-3
    batch: int = 16
    tokens: int = 96  # image tokens of an example that are trained on, masked ones first
    full_from: float = 0.85  # share after which all are
    warmup: int = 30  # steps
    decay_from: float = 0.3  # share after which the rate falls linearly
    reuse: float = 8.0  # times an example is shown, on average
    own_guidance: float = 2.0  # scale that the steered model's own caption-free prediction gives the pictures' velocity
    average: float = 0.98  # decay of the weights' average, applied every 4th step
    warm_pool: int = 240  # examples drawn before the first step
    save_every: float = 300.0  # seconds
    report_every: int = 25  # steps


def optimisers_of(net: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the block's matrices and the layer behind it, AdamW for embeddings, modulations, biases and norms."""
    inner: list[nn.Parameter] = []
    outer: list[nn.Parameter] = []
    for name, parameter in net.named_parameters():
        is_block = name.startswith(("single_transformer_blocks", "controlnet_single_blocks"))
        is_inner = parameter.ndim == 2 and is_block and not is_modulation(name)
        (inner if is_inner else outer).append(parameter)
    return [
        Muon(inner, lr=rate, weight_decay=0.01),
        torch.optim.AdamW(outer, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


class Trainer:
    """The training loop and its state on disk."""

    def __init__(self, recipe: Recipe, work: Path, budget: float) -> None:
        """budget: seconds, those of earlier runs included."""
        self.recipe, self._path = recipe, work / CHECKPOINT
        self.clock, self.step, self.shown = Clock(budget), 0, 0
        torch.manual_seed(0)
        transformer, (self._clip, self._t5) = embedded_transformer(), embedded_encoders()
        self.net = build_controlnet(transformer)
        self.optimisers = optimisers_of(self.net, recipe.rate)
        self._average = Average({"controlnet": self.net})
        tokenizers = embedded_tokenizers()
        self.pool = EdgesPool(work / "pool", embedded_vae(), tokenizers, seeds.EDGES_TRAIN, MORE_BOXES)
        self._empty = tokenizers([""])
        if (state := load(self._path)) is not None:
            self._resume(state)
        self._steering = Steering(self.net, transformer)
        torch.manual_seed(1000 + self.step)

    def _resume(self, state: dict[str, Any]) -> None:
        load_state(self.net, state["net"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self._average.weights = state["average"]
        self.step, self.shown, self.clock.spent = state["step"], state["shown"], state["spent"]

    def keep(self) -> None:
        state = {
            "net": state_of(self.net),
            "average": self._average.weights,
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
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
            tokens = self.recipe.tokens if share < self.recipe.full_from else IMAGE_TOKENS
            errors.append(self.learn(self.pool.steered(self.recipe.batch), tokens))
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

    def learn(self, steered: Steered, tokens: int) -> float:
        """Run one training step; returns the mean squared error under the masks."""
        loss, masked = self._loss(steered, tokens)
        for parameter in self.net.parameters():
            parameter.grad = None
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        self.shown += len(steered.control)
        if self.step % 4 == 0:
            turn = self.step / 4
            self._average.update(min(self.recipe.average, (1 + turn) / (10 + turn)))
        return float(masked)

    def _loss(self, steered: Steered, tokens: int) -> tuple[Tensor, Tensor]:
        batch = steered.batch
        dropped = torch.rand(len(batch.clip), 1) < UNCONDITIONAL
        ids = [torch.where(dropped, e, x) for e, x in zip(self._empty, (batch.clip, batch.t5), strict=True)]
        noised = noise_batch(batch, tokens)
        control = take(steered.control, noised.chosen)
        predicted = self._velocity(noised, control, ids)
        wanted = noised.velocity + self._guidance(predicted.detach(), noised, control, dropped)
        return weighted_error(predicted, wanted, noised.inside)

    def _velocity(self, noised: Noised, control: Tensor, ids: Sequence[Tensor]) -> Tensor:
        with precision(CPU):
            return self._steering.velocity(noised, control, read_captions(self._clip, self._t5, *ids))

    @torch.no_grad()
    def _guidance(self, predicted: Tensor, noised: Noised, control: Tensor, dropped: Tensor) -> Tensor:
        """What is added to the pictures' velocity, [batch, tokens, 64], as the embedded model was trained with: without
        it the ControlNet would learn to take that model's guidance away."""
        free = self._velocity(noised, control, [empty.expand(len(dropped), -1) for empty in self._empty])
        return torch.where(dropped[..., None], 0.0, (1 - 1 / self.recipe.own_guidance) * (predicted - free))

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
