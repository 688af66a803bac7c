"""FLUX's transformer with random weights: steps, ours and diffusers', and pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Self

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor

from benchmarks.gpu.bench import Bench, Call
from benchmarks.gpu.boxes import box_tokens
from benchmarks.gpu.graphs import GraphSwitch
from benchmarks.gpu.sizes import FluxSize
from benchmarks.micro.rows import (
    PAGES,
    diffusers_step,
    modulated,
    pages_between,
    primed_entry,
    template_row,
    transformer_row,
)
from model_executor.kernels.gpu_attention import Attend
from model_executor.kernels.gpu_operators import GpuOperators
from model_executor.kernels.operators import best_operators
from model_executor.models.base import Row
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.models.transformer.flux_transformer import FluxTransformer
from model_executor.page_cache.pages import Pages

GUIDANCE = 3.5
PIXELS = 16  # of a token's side


class FluxBench:
    """One module for our steps and diffusers'; on a GPU, layers that we join are views of the joined weights."""

    def __init__(self, bench: Bench) -> None:
        self.size: FluxSize = bench.size.flux
        self._bench = bench
        self.module = bench.make(lambda: FluxTransformer2DModel(**self.size.transformer))
        self._operators = best_operators(bench.device)
        self.denoiser = FluxTransformer(self.module, 1000, self._operators)
        self.switch = GraphSwitch(self.denoiser, bench.graphs)
        self.layout = self.denoiser.page_layout(PAGES)
        self.entry_bytes = self.layout.entry_bytes(self.size.image_tokens)
        self.row = transformer_row(self.denoiser, self.size.side, self.size.text_tokens, bench.draw, GUIDANCE)

    @property
    def operators(self) -> str:
        """The operators that our steps use besides PyTorch's kernels."""
        return self._operators.digest

    @property
    def flop(self) -> float:
        """Operations of an exact step: products over all tokens and attention between them. Modulation is left out: a
        run computes it once for all its steps."""
        config, tokens = self.module.config, self.size.image_tokens + self.size.text_tokens
        hidden = config.num_attention_heads * config.attention_head_dim
        # Weights per token: qkv, out and mlp of a single block, or of the one stream of a double block that it passes.
        products = (4 + 8) * hidden**2 * (config.num_layers + config.num_single_layers)
        attention = 2 * tokens * hidden * (config.num_layers + config.num_single_layers)
        return float(2 * tokens * (products + attention))

    def bound(self, *ratios: float) -> float:
        """The most that a step of edits with these shares of active image tokens can gain over an exact step."""
        tokens, text = self.size.image_tokens, self.size.text_tokens
        return len(ratios) * (tokens + text) / sum(self.num_active(ratio) + text for ratio in ratios)

    def num_active(self, ratio: float) -> int:
        return max(1, round(ratio * self.size.image_tokens))

    def attending(self, ways: Mapping[str, Attend]) -> dict[str, Self]:
        """Twins over the same weights with these ways of attention; none on a CPU, whose operators have their own."""
        twins = dict[str, Self]()
        if isinstance(operators := self._operators, GpuOperators):
            for name, way in ways.items():
                twins[name] = twin = copy(self)
                twin.denoiser = self.denoiser.computing_with(operators.attending(way))
        return twins

    def exact(self, batch: int = 1) -> Call:
        rows = [self.row] * batch
        return lambda: self.denoiser.forward(rows)

    def edits(self, ratio: float, entries: Sequence[tuple[Tensor, Tensor]]) -> Call:
        """A step of an edit for each of the entries, which are those of the two keyframes around it."""
        return self.mixed([ratio] * len(entries), entries)

    def mixed(self, ratios: Sequence[float], entries: Sequence[tuple[Tensor, Tensor]]) -> Call:
        """As `edits`, with a mask ratio for each edit."""
        rows = [self._edit(ratio, near, far) for ratio, (near, far) in zip(ratios, entries, strict=True)]
        return lambda: self.denoiser.forward(rows)

    def _edit(self, ratio: float, near: Tensor, far: Tensor) -> Row:
        pages = pages_between(self.denoiser, self.row, near, far)
        return replace(self.row, active=self.box(ratio), pages=pages)

    def agreement(self, ratio: float) -> tuple[float, float]:
        """Relative differences: of our exact step from diffusers', and of a mask-aware one from our exact one (an edit
        that is the template itself, over its pages at this noise level)."""
        return agreement(self.denoiser, self.row, self.diffusers()()[0][0], self.box(ratio))

    def at(self, sigma: float, row: Row) -> Row:
        """A row at another noise level."""
        return modulated(self.denoiser, replace(row, sigma=torch.tensor(sigma, device=self._bench.device)))

    def box(self, ratio: float, place: int = 0) -> Tensor:
        """Token indices of an upright box with this share of the picture, at one of many places."""
        return box_tokens(self.num_active(ratio), self.size.side, self._bench.device, place)

    def entry(self) -> Tensor:
        """Room for the pages of one keyframe."""
        return torch.empty(self.entry_bytes, dtype=torch.uint8, device=self._bench.device)

    def keyframes(self) -> tuple[float, ...]:
        """Noise levels, falling from 1 to 0."""
        last = self.size.keyframes - 1
        return tuple(1 - number / last for number in range(last + 1))

    def sigmas(self) -> list[float]:
        """Noise levels of a run's steps."""
        return [1 - step / self.size.steps for step in range(self.size.steps)]

    def prime(self, entries: Sequence[Tensor]) -> Call:
        """Pages of all keyframes in one pass, as in an idle engine."""
        levels = zip(self.keyframes(), entries, strict=True)
        rows = [template_row(self.row, sigma, entry) for sigma, entry in levels]
        return lambda: self.denoiser.prime(rows, (0, self.denoiser.num_pages))

    def diffusers(self, batch: int = 1) -> Callable[[], tuple[Tensor]]:
        """The module's own forward, dense."""
        return diffusers_step(self.module, self.row, batch)

    def compile(self) -> None:
        """Compile the module's blocks as in diffusers' guide to torch.compile; our forward does not call them."""
        self.module.compile_repeated_blocks(fullgraph=True, dynamic=False, backend=self._bench.size.backend)


def agreement(denoiser: Denoiser, row: Row, theirs: Tensor, active: Tensor) -> tuple[float, float]:
    """As `FluxBench.agreement`. theirs: diffusers' velocity of the row, [image tokens, width]. active: the tokens of
    the mask-aware step."""
    entry = primed_entry(denoiser, row, float(row.sigma))
    pages = Pages(denoiser.page_layout(PAGES), len(row.latents), entry, None, 0.0)
    (exact,) = denoiser.forward([row])
    (masked,) = denoiser.forward([replace(row, active=active, pages=pages)])
    return _difference(exact, theirs), _difference(masked, exact[active])


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())
