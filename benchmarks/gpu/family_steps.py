"""The section on families beside FLUX.1: steps of their transformers at published shapes, ours and diffusers'.

An edit of FLUX.2 klein has the template's tokens after the image's, which exact steps compute and mask-aware ones find
in their pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.boxes import box_tokens
from benchmarks.gpu.flux import agreement
from benchmarks.gpu.graphs import GraphSwitch, as_graph
from benchmarks.gpu.report import Figures
from benchmarks.gpu.sizes import FamilySize
from benchmarks.micro.rows import (
    exact_row,
    klein_step,
    operations_bound,
    pages_between,
    primed_entry,
    z_image_step,
)
from model_executor.kernels.operators import best_operators
from model_executor.models.base import Row
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.models.transformer.flux2_transformer import Flux2Transformer
from model_executor.models.transformer.z_image_transformer import ZImageTransformer
from tools.random_checkpoints import z_image_transformer


@dataclass(frozen=True)
class Kind:
    """A family. widths: of latents, condition, prompt and pooled prompt. diffusers: as `klein_step`. image_blocks: in
    a model of this configuration, blocks that compute image tokens alone."""

    denoiser: type[Denoiser]
    make: Callable[..., Any]
    widths: Callable[[Any], tuple[int, int, int, int]]
    diffusers: Callable[[Any, Row], Callable[[], Tensor]]
    image_blocks: Callable[[Any], int] = lambda config: 0


KINDS = {
    "FLUX.2-klein-4B": Kind(
        Flux2Transformer,
        Flux2Transformer2DModel,
        lambda config: (config.in_channels, config.in_channels, config.joint_attention_dim, 0),
        klein_step,
    ),
    "Z-Image": Kind(
        ZImageTransformer,
        z_image_transformer,
        lambda config: (4 * config.in_channels, 0, config.cap_feat_dim, 0),
        z_image_step,
        lambda config: int(config.n_refiner_layers),
    ),
}
"""By names of `Size.families`."""


@torch.inference_mode()
def run(bench: Bench) -> None:
    """A family at a time, of which nothing is left when the next one is made."""
    figures: dict[str, Figures] = {}
    for name, size in bench.size.families.items():
        figures[name] = _figures(bench, KINDS[name], size)
        bench.report.put("family_steps", families=figures)
        bench.clear()


def _figures(bench: Bench, kind: Kind, size: FamilySize) -> Figures:
    """ratios: by mask ratio, milliseconds of a step, and how much faster than an exact one it can be by operations."""
    module = bench.make(lambda: kind.make(**size.transformer))
    denoiser = kind.denoiser(module, 1000, best_operators(bench.device))
    switch = GraphSwitch(denoiser, bench.graphs)
    row = exact_row(denoiser, size.side, size.text_tokens, kind.widths(module.config), bench.draw)
    active = {ratio: box_tokens(round(ratio * size.side**2), size.side, bench.device) for ratio in size.ratios}
    diffusers = kind.diffusers(module, row)
    switch.set(False)
    from_diffusers, from_exact = agreement(denoiser, row, diffusers(), active[max(size.ratios)])
    near, far = (primed_entry(denoiser, row, sigma) for sigma in (0.75, 0.5))
    pages = pages_between(denoiser, row, near, far)
    masked = {f"{ratio:g}": replace(row, active=tokens, pages=pages) for ratio, tokens in active.items()}
    steps = {name: partial(denoiser.forward, [step]) for name, step in ({"exact": row} | masked).items()}
    seconds = bench.medians({"diffusers": diffusers, **switch.both(steps, masked)})
    image_tokens = denoiser.rows_per_token * size.side**2
    bounds = {
        f"{ratio:g}": operations_bound(
            image_tokens, len(tokens), size.text_tokens, denoiser.num_pages, kind.image_blocks(module.config)
        )
        for ratio, tokens in active.items()
    }
    return {
        "billion_parameters": sum(parameter.numel() for parameter in module.parameters()) / 1e9,
        "image_tokens": image_tokens,
        "text_tokens": size.text_tokens,
        "exact_from_diffusers": from_diffusers,
        "masked_from_exact": from_exact,
        "diffusers_ms": 1e3 * seconds["diffusers"],
        "exact_ms": 1e3 * seconds["exact"],
        "ratios": {
            ratio: {"ms": 1e3 * seconds[ratio], "bound": bound, **_graph_ms(seconds, ratio)}
            for ratio, bound in bounds.items()
        },
        "graphs": switch.figures(),
    }


def _graph_ms(seconds: Mapping[str, float], ratio: str) -> Figures:
    """Empty where steps cannot be captured."""
    name = as_graph(ratio)
    return {"graph_ms": 1e3 * seconds[name]} if name in seconds else {}
