"""Stage `train`: trains the segmenter in one process of one thread; can be resumed.

Its progress is measured by the CPU time that it has used, summed over runs, so that other work on the machine delays it
and changes nothing else.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train_embedded import seeds
from tools.train_embedded.muon import Muon
from tools.train_embedded.training import Average, load, load_state, save, set_rate, state_of
from tools.train_segmenter.models import Sizes, build_model, tokenizer_in
from tools.train_segmenter.pool import Batch, Pool
from tools.train_segmenter.things import SHOWN
from tools.train_segmenter.tokens import logits_of, to_patches
from tools.train_segmenter.wording import STEPS, teach_wording

CHECKPOINT = "segmenter.pt"
TOKENIZER = "tokenizer"
SMOOTHING = 32.0  # pixels added to both areas of an overlap, so that an empty mask has one too
SIZES = Sizes()


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters. Shares are of the time budget."""

    sizes: Sizes = SIZES
    rate: float = 2.5e-3
    pictures: int = 8  # of a batch
    prompts: int = 4  # of each picture
    guidance: float = 1.0  # weight of the loss of the head that tells what each pixel shows
    patches: int = 256  # of each picture that are seen in a step, of 1,024
    whole_from: float = 0.85  # share after which all patches are seen
    whole_pictures: int = 4  # of a batch from then on
    warmup: int = 60  # steps
    decay_from: float = 0.3  # share after which the rate falls linearly
    reuse: float = 8.0  # times a scene is shown, on average
    average: float = 0.99  # decay of the weights' average, applied every 4th step
    warm_pool: int = 128  # scenes drawn before the first step
    save_every: float = 240.0  # seconds
    report_every: int = 25  # steps


def optimisers_of(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of all layers; AdamW for embeddings, the decoder's output, biases and norms."""
    inner: list[nn.Parameter] = []
    outer: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_inner = parameter.ndim == 2 and "embedding" not in name
        (inner if is_inner else outer).append(parameter)
    return [
        Muon(inner, lr=rate, weight_decay=0.01),
        torch.optim.AdamW(outer, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


class Trainer:
    """The training loop and its state on disk."""

    def __init__(self, recipe: Recipe, work: Path, budget: float, wording_steps: int = STEPS) -> None:
        """budget: seconds of CPU time, those of earlier runs included."""
        self.recipe, self._path = recipe, work / CHECKPOINT
        self._budget, self._spent_earlier = budget, 0.0
        self.step, self.shown = 0, 0  # steps done, and pictures seen in them
        self.falls = 0  # times that it has gone back to the averaged weights
        torch.manual_seed(0)
        self._tokenizer = tokenizer_in(work / TOKENIZER)
        self.model = build_model(self._tokenizer, recipe.sizes)
        self._guide = nn.Linear(recipe.sizes.vision, len(SHOWN) * recipe.sizes.patch**2)  # not exported
        self._modules = nn.ModuleDict({"segmenter": self.model, "guide": self._guide})
        self.optimisers = optimisers_of(self._modules, recipe.rate)
        self._average = Average({"segmenter": self.model})
        self.pool = Pool(seeds.SEGMENTER_TRAIN)
        if (state := load(self._path)) is not None:
            self._resume(state)
        else:
            self._report(
                f"{teach_wording(self.model, self._tokenizer, wording_steps):.3f} of the wordings are read right"
            )
            self._average.load({"segmenter": state_of(self.model)})
        torch.manual_seed(1000 + self.step)
        self._rng = random.Random(1000 + self.step)

    def _resume(self, state: dict[str, Any]) -> None:
        load_state(self._modules, state["modules"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self._average.weights = state["average"]
        self.step, self.shown, self._spent_earlier = state["step"], state["shown"], state["spent"]
        self.falls = state.get("falls", 0)
        self.pool.skip_to(state["drawn"])

    def keep(self) -> None:
        if not all(weights.isfinite().all() for weights in self._modules.parameters()):
            raise ArithmeticError("the weights are not finite any more; train again from the last checkpoint")
        state = {
            "modules": state_of(self._modules),
            "average": self._average.weights,
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "sizes": self.recipe.sizes,
            "drawn": self.pool.drawn,
        }
        counts = {"step": self.step, "shown": self.shown, "spent": self.spent, "falls": self.falls}
        save(self._path, state | counts)

    @property
    def spent(self) -> float:
        """Seconds of CPU time."""
        return self._spent_earlier + time.process_time()

    def train(self) -> None:
        """Train until the time budget is spent."""
        self.fill()
        self._report(f"{self.pool.drawn} scenes, at step {self.step}")
        losses, saved_at, reported_at = list[float](), time.monotonic(), self.spent
        while (share := self.spent / self._budget) < 1:
            set_rate(self.optimisers, self._rate(share))
            losses.append(self.learn(is_whole=share >= self.recipe.whole_from))
            self.fill()
            if len(losses) == self.recipe.report_every:
                mean, speed = sum(losses) / len(losses), (self.spent - reported_at) / len(losses)
                self._report(f"step {self.step} loss {mean:.4f}, {speed:.2f} s a step")
                losses, reported_at = [], self.spent
            if time.monotonic() - saved_at > self.recipe.save_every:
                self.keep()
                saved_at = time.monotonic()
        self.keep()

    def learn(self, is_whole: bool = False) -> float:
        """Run one training step; returns the loss. is_whole: whether all patches are seen."""
        recipe = self.recipe
        batch = self.pool.batch(self._rng, recipe.whole_pictures if is_whole else recipe.pictures, recipe.prompts)
        loss = self._loss(batch, recipe.sizes.patch, None if is_whole else recipe.patches)
        for parameter in self._modules.parameters():
            parameter.grad = None
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._modules.parameters(), 1.0)
        if not norm.isfinite():
            self._fall_back()
            return float(loss.detach())
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        self.shown += len(batch.images)
        if self.step % 4 == 0:
            turn = self.step / 4
            self._average.update(min(recipe.average, (1 + turn) / (10 + turn)))
        return float(loss.detach())

    def _fall_back(self) -> None:
        """Go on from the averaged weights at half the rate: attention that has become too sharp has no gradient."""
        self.falls += 1
        self._report(f"step {self.step}: the gradient is not finite; back to the averaged weights")
        load_state(self.model, self._average.weights["segmenter"])
        self.optimisers = optimisers_of(self._modules, self.recipe.rate)

    def _loss(self, batch: Batch, patch: int, patches: int | None) -> Tensor:
        pixels = batch.images.permute(0, 3, 1, 2).float() / 127.5 - 1
        text_ids = self._tokenizer(batch.texts, padding=True, return_tensors="pt")["input_ids"]
        masks, shown, chosen = to_patches(batch.masks, patch), to_patches(batch.shown, patch), None
        if patches is not None:
            chosen = choose(shown, patches)
            masks = take(masks, chosen.repeat_interleave(self.recipe.prompts, dim=0))
            shown = take(shown, chosen)
        logits, features = logits_of(self.model, pixels, text_ids, self.recipe.prompts, chosen)
        guesses = self._guide(features).view(-1, len(SHOWN))
        guided = F.cross_entropy(guesses, shown.flatten().long())
        return error(logits, masks.float()) + self.recipe.guidance * guided

    def _rate(self, share: float) -> float:
        recipe = self.recipe
        fall = min(1.0, max(0.02, (1 - share) / (1 - recipe.decay_from)))
        return recipe.rate * min(1.0, (self.step + 1) / recipe.warmup) * fall * 0.5**self.falls

    def fill(self) -> None:
        """Draw scenes so that each is shown `reuse` times on average."""
        while len(self.pool) < self.recipe.warm_pool or self.pool.drawn < self.shown / self.recipe.reuse:
            self.pool.grow()

    def _report(self, line: str) -> None:
        print(f"{self.spent:.0f}s {line}", flush=True)


def choose(shown: Tensor, number: int) -> Tensor:
    """Indices of `number` random patches of each picture, [pictures, number]; one that shows two things is preferred.

    shown: [pictures, patches, pixels of a patch].
    """
    has_edge = shown.amax(-1) != shown.amin(-1)
    return (torch.rand(has_edge.shape) + 0.6 * has_edge).topk(number, dim=1).indices


def take(patches: Tensor, chosen: Tensor) -> Tensor:
    """The chosen of the patches [pictures, patches, pixels of a patch]; chosen: indices, [pictures, chosen patches]."""
    return patches.gather(1, chosen[..., None].expand(-1, -1, patches.shape[-1]))


def error(logits: Tensor, masks: Tensor) -> Tensor:
    """Cross-entropy, and the soft overlap's distance from 1; both [prompts, patches, pixels of a patch]."""
    shown = logits.sigmoid()
    inside, areas = (shown * masks).sum((1, 2)), (shown + masks).sum((1, 2))
    overlap = (2 * inside + SMOOTHING) / (areas + SMOOTHING)
    return F.binary_cross_entropy_with_logits(logits, masks) + (1 - overlap).mean()
