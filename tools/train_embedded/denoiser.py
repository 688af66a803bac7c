"""Stages `denoiser`, `boxes`, `distil` and `refine`: train the transformer and its text encoders, first mostly with
silhouettes as masks, then mostly with boxes, and distil guidance into the transformer; `refine` goes on from there.

FluxFillPipeline has no classifier-free guidance, which a model with so little training needs. So in `distil` the model
learns to predict what its own averaged weights predict with guidance, and in `refine` the guided velocity itself.
"""

import copy
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModel, T5EncoderModel

from tools.train_embedded import seeds
from tools.train_embedded.flow import (
    UNCONDITIONAL,
    Noised,
    Text,
    noise_batch,
    read_captions,
    velocity,
    weighted_error,
)
from tools.train_embedded.layout import IMAGE_TOKENS
from tools.train_embedded.masks import FIRST, MORE_BOXES, Mixture
from tools.train_embedded.models import build_text_encoders, build_transformer, is_modulation
from tools.train_embedded.muon import Muon
from tools.train_embedded.pool import Batch, Pool
from tools.train_embedded.ranks import average_gradients, launch
from tools.train_embedded.sparse import Positions, make_sparse
from tools.train_embedded.tokenizing import Tokenizers, tokenizers_in
from tools.train_embedded.training import (
    Average,
    Clock,
    has_fast_bfloat16,
    load,
    load_state,
    precision,
    save,
    set_rate,
    state_of,
    training_device,
)
from tools.train_embedded.vae import load_vae
from tools.train_embedded.wording import teach_wording

SEED_STRIDE = 1_000_000  # between the ranks' scenes
SAVE_EVERY = 120.0  # seconds
REPORT_EVERY = 50  # steps


@dataclass(frozen=True)
class Recipe:
    """A stage's hyperparameters. Shares are of the stage's time budget."""

    name: str
    rate: float
    batch: int  # per rank
    warmup: int  # steps
    decay_from: float  # share after which the rate falls linearly
    full_from: float  # share after which every image token is trained on
    tokens: int  # image tokens before that
    reuse: float  # times an example is shown, on average
    average: float  # decay of the weights' average, applied every 4th step
    guidance: float | None  # scale to distil from the initial weights; None: learn from pictures
    own_guidance: float  # scale that the model's own caption-free prediction gives the pictures' velocity; 1: none
    detail_weight: float  # of masked tokens with hands or the figure's outline, relative to other masked ones
    mixture: Mixture
    pool: str  # its folder's name, without the rank
    warm_pool: int  # examples per rank drawn before the first step
    first_seed: int


DENOISER = Recipe(
    "denoiser", rate=1.5e-3, batch=16, warmup=60, decay_from=0.5, full_from=0.88, tokens=96, reuse=4.0, average=0.995,
    guidance=None, own_guidance=1.0, detail_weight=1.0, mixture=FIRST,
    pool="pool", warm_pool=240, first_seed=seeds.DENOISER_TRAIN,
)  # fmt: skip
BOXES = Recipe(
    "boxes", rate=1e-3, batch=16, warmup=60, decay_from=0.15, full_from=0.7, tokens=128, reuse=4.0, average=0.995,
    guidance=None, own_guidance=1.0, detail_weight=1.0, mixture=MORE_BOXES,
    pool="boxes", warm_pool=960, first_seed=seeds.BOXES_TRAIN,
)  # fmt: skip
DISTIL = Recipe(
    "distil", rate=4e-4, batch=16, warmup=15, decay_from=0.3, full_from=0.7, tokens=128, reuse=8.0, average=0.95,
    guidance=2.5, own_guidance=1.0, detail_weight=1.0, mixture=MORE_BOXES,
    pool="boxes", warm_pool=960, first_seed=seeds.BOXES_TRAIN,
)  # fmt: skip
REFINE = Recipe(
    "refine", rate=5e-4, batch=16, warmup=40, decay_from=0.3, full_from=0.75, tokens=144, reuse=4.0, average=0.98,
    guidance=None, own_guidance=2.0, detail_weight=2.0, mixture=MORE_BOXES,
    pool="refine", warm_pool=240, first_seed=seeds.REFINE_TRAIN,
)  # fmt: skip
REFINE_ON_GPU = replace(REFINE, rate=1e-3, batch=256, tokens=IMAGE_TOKENS, reuse=20.0, average=0.99, warm_pool=4800)


@dataclass(frozen=True)
class Models:
    transformer: FluxTransformer2DModel
    clip: CLIPTextModel
    t5: T5EncoderModel

    def named(self) -> dict[str, nn.Module]:
        return {"transformer": self.transformer, "text_encoder": self.clip, "text_encoder_2": self.t5}

    def parameters(self) -> list[nn.Parameter]:
        return [p for module in self.named().values() for p in module.parameters() if p.requires_grad]


def build_models(tokenizers: Tokenizers) -> Models:
    torch.manual_seed(0)
    clip, t5 = build_text_encoders(tokenizers.clip, tokenizers.t5)
    return Models(build_transformer(), clip, t5)


def load_models(weights: dict[str, dict[str, Tensor]], tokenizers: Tokenizers) -> Models:
    """Models with the given weights, such as a checkpoint's `average`: module -> its state."""
    models = build_models(tokenizers)
    for name, module in models.named().items():
        load_state(module, weights[name])
    return models


def optimisers_of(models: Models, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the transformer's blocks except modulations, AdamW for the rest."""
    inner: list[nn.Parameter] = []
    outer: list[nn.Parameter] = []
    for name, module in models.named().items():
        for key, param in module.named_parameters():
            matrix = param.ndim == 2 and "transformer_blocks" in key and not is_modulation(key)
            if param.requires_grad:
                (inner if name == "transformer" and matrix else outer).append(param)
    return [
        Muon(inner, lr=rate, weight_decay=0.01),
        torch.optim.AdamW(outer, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def compile_blocks(transformer: FluxTransformer2DModel) -> None:
    """On a CPU compiled blocks are faster in bfloat16 and a tenth slower in float32. On a GPU this was not tried."""
    if transformer.device.type == "cpu" and has_fast_bfloat16(transformer.device):
        transformer.compile_repeated_blocks(dynamic=False)


class Teacher:
    """The initial weights with classifier-free guidance: extrapolates the velocities of two passes."""

    def __init__(self, models: Models, tokenizers: Tokenizers, scale: float) -> None:
        self._transformer = copy.deepcopy(models.transformer).requires_grad_(False).eval()
        device = models.transformer.device
        if has_fast_bfloat16(device):
            self._transformer = self._transformer.bfloat16()
        self._positions = make_sparse(self._transformer)
        compile_blocks(self._transformer)
        self._scale = scale
        self._empty = read_captions(models.clip, models.t5, *(ids.to(device) for ids in tokenizers([""])))

    @torch.no_grad()
    def velocity(self, noised: Noised, text: Text, dropped: Tensor) -> Tensor:
        """The guided velocity, [batch, tokens, 64]; not guided for samples whose caption was dropped."""
        size = len(noised.hidden)
        both = Noised(*(torch.cat([getattr(noised, field.name)] * 2) for field in fields(Noised)))
        hidden, moment = both.hidden.to(self._transformer.dtype), both.time.to(self._transformer.dtype)
        pooled = torch.cat([text.pooled, self._empty.pooled.expand(size, -1)]).to(self._transformer.dtype)
        words = torch.cat([text.words, self._empty.words.expand(size, -1, -1)]).to(self._transformer.dtype)
        self._positions.select(both.chosen)
        out = velocity(self._transformer, replace(both, hidden=hidden, time=moment), Text(pooled, words))
        asked, free = out.chunk(2)
        return torch.where(dropped[:, None, None], free, free + self._scale * (asked - free))


class Trainer:
    """One rank's training loop, its state on disk, and its share of the examples."""

    def __init__(self, recipe: Recipe, work: Path, budget: float, start: dict[str, Any] | None, rank: int) -> None:
        self.device = training_device()
        self.recipe, self.rank, self._path = recipe, rank, work / f"{recipe.name}.pt"
        self.clock, self.step, self.shown = Clock(budget), 0, 0
        self.tokenizers = tokenizers_in(work / "tokenizers")
        self.models = build_models(self.tokenizers)
        state = load(self._path)
        if start is not None:
            self._start_from(start["average"])
        elif state is None:
            right = teach_wording(self.models.clip, self.models.t5, self.tokenizers)
            self.report(f"text encoders read {right:.2f} of captions fully right")
        for module in self.models.named().values():
            module.to(self.device)
        self.teacher = Teacher(self.models, self.tokenizers, recipe.guidance) if recipe.guidance else None
        self.positions: Positions = make_sparse(self.models.transformer)
        compile_blocks(self.models.transformer)
        self.optimisers = optimisers_of(self.models, recipe.rate)
        self.average = Average(self.models.named())
        if state is not None:
            self._resume(state)
        seed = recipe.first_seed + SEED_STRIDE * rank
        folder = work / f"{recipe.pool}{rank}"
        self.pool = Pool(folder, load_vae(work / "vae").to(self.device), self.tokenizers, seed, recipe.mixture)
        torch.manual_seed(1000 * self.step + rank)
        self._empty = tuple(ids.to(self.device) for ids in self.tokenizers([""]))

    def _start_from(self, weights: dict[str, dict[str, Tensor]]) -> None:
        for name, module in self.models.named().items():
            load_state(module, weights[name])
        if self.recipe.guidance is not None:  # the teacher reads with these encoders too
            self.models.clip.requires_grad_(False)
            self.models.t5.requires_grad_(False)

    def _resume(self, state: dict[str, Any]) -> None:
        for name, module in self.models.named().items():
            load_state(module, state["models"][name])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.average.load(state["average"])
        self.step, self.shown, self.clock.spent = state["step"], state["shown"], state["spent"]

    def keep(self) -> None:
        if self.rank:
            return
        models = {name: state_of(module) for name, module in self.models.named().items()}
        optimisers = [optimiser.state_dict() for optimiser in self.optimisers]
        progress = {"step": self.step, "shown": self.shown, "spent": self.clock.spent}
        state = {"models": models, "average": self.average.weights, "optimisers": optimisers}
        save(self._path, {**state, **progress})

    def report(self, line: str) -> None:
        if not self.rank:
            print(f"{self.recipe.name} {self.clock.spent:.0f}s {line}", flush=True)

    def fill(self, ranks: int) -> None:
        """Draw new examples so that each is shown `reuse` times on average."""
        wanted = max(self.recipe.warm_pool, self.shown / ranks / self.recipe.reuse)
        while self.pool.drawn < wanted:
            self.pool.grow()
        self.pool.grow_if_ready()

    def rate(self, share: float) -> float:
        recipe = self.recipe
        fall = min(1.0, max(0.02, (1 - share) / (1 - recipe.decay_from)))
        return recipe.rate * min(1.0, (self.step + 1) / recipe.warmup) * fall

    def loss(self, batch: Batch, tokens: int) -> tuple[Tensor, Tensor]:
        dropped = torch.rand(len(batch.clip), device=self.device) < UNCONDITIONAL
        clip_ids = torch.where(dropped[:, None], self._empty[0], batch.clip)
        t5_ids = torch.where(dropped[:, None], self._empty[1], batch.t5)
        noised = noise_batch(batch, tokens)
        self.positions.select(noised.chosen)
        with precision(self.device):
            text = read_captions(self.models.clip, self.models.t5, clip_ids, t5_ids)
            predicted = velocity(self.models.transformer, noised, text)
        if self.teacher is not None:
            wanted = self.teacher.velocity(noised, text, dropped)
        else:
            wanted = noised.velocity + self._own_guidance(predicted.detach(), noised, dropped)
        importance = 1 + (self.recipe.detail_weight - 1) * noised.detail
        return weighted_error(predicted, wanted, noised.inside, importance)

    @torch.no_grad()
    def _own_guidance(self, predicted: Tensor, noised: Noised, dropped: Tensor) -> Tensor:
        """What is added to the pictures' velocity so that one pass learns the guided velocity, [batch, tokens, 64].

        If p is the prediction, f the caption-free one and v the expected velocity, then p = v + w (p - f) holds for
        p = f + (v - f) / (1 - w), which is guidance of scale 1 / (1 - w). Tang et al., 2025: model guidance.
        """
        if self.recipe.own_guidance == 1.0:
            return torch.zeros_like(predicted)
        ids = [empty.expand(len(dropped), -1) for empty in self._empty]
        with precision(self.device):
            text = read_captions(self.models.clip, self.models.t5, *ids)
            free = velocity(self.models.transformer, noised, text)
        added = (1 - 1 / self.recipe.own_guidance) * (predicted - free)
        return torch.where(dropped[:, None, None], 0.0, added)

    def train(self, ranks: int) -> None:
        params, share = self.models.parameters(), self.clock.spent / self.clock.budget
        self.fill(ranks)
        self.report(f"pool {self.pool.drawn}, resuming at step {self.step}")
        self.clock.tick()
        saved_at = reported_at = time.monotonic()
        errors: list[Tensor] = []  # read when they are reported: a device is not waited for
        while share < 1:
            own_share = self.clock.tick()
            set_rate(self.optimisers, self.rate(share))
            self.fill(ranks)
            tokens = self.recipe.tokens if share < self.recipe.full_from else IMAGE_TOKENS
            loss, masked = self.loss(self.pool.batch(self.recipe.batch), tokens)
            for param in params:
                param.grad = None
            loss.backward()
            share = average_gradients(params, own_share)
            norm = nn.utils.clip_grad_norm_(params, 1.0)
            for optimiser in self.optimisers:
                optimiser.step()
            self.step += 1
            self.shown += self.recipe.batch * ranks
            if self.step % 4 == 0:
                turn = self.step / 4
                self.average.update(min(self.recipe.average, (1 + turn) / (10 + turn)))
            errors.append(masked)
            if self.step % REPORT_EVERY == 0:
                now = time.monotonic()
                speed = REPORT_EVERY * self.recipe.batch * ranks / (now - reported_at)
                mean = float(sum(errors) / len(errors))
                self.report(
                    f"step {self.step} shown {self.shown} of {self.pool.drawn * ranks} examples, {tokens} tokens, "
                    f"masked error {mean:.4f}, norm {float(norm):.2f}, rate {self.rate(share):.5f}, {speed:.1f}/s"
                )
                errors, reported_at = [], now
            if time.monotonic() - saved_at > SAVE_EVERY:
                self.keep()
                saved_at = time.monotonic()
        self.keep()
        self.pool.close()


def train_denoiser(work: Path, budget: float, ranks: int) -> None:
    tokenizers_in(work / "tokenizers")  # built once, before the ranks start
    launch(ranks, lambda rank, number: Trainer(DENOISER, work, budget, None, rank).train(number))


def train_on_boxes(work: Path, budget: float, ranks: int) -> None:
    start = load(work / "denoiser.pt")
    assert start is not None, "the denoiser comes before its continuation"
    launch(ranks, lambda rank, number: Trainer(BOXES, work, budget, start, rank).train(number))


def distil_guidance(work: Path, budget: float, ranks: int) -> None:
    start = load(work / "boxes.pt")
    assert start is not None, "the boxes come before the distillation"
    launch(ranks, lambda rank, number: Trainer(DISTIL, work, budget, start, rank).train(number))


def refine(work: Path, budget: float, ranks: int) -> None:
    start = load(work / "distil.pt")
    assert start is not None, "the distillation, or a checkpoint to start from, comes before the refinement"
    recipe = REFINE if training_device().type == "cpu" else REFINE_ON_GPU
    launch(ranks, lambda rank, number: Trainer(recipe, work, budget, start, rank).train(number))
