"""One denoising step of every transformer family's blocks, mask-aware against exact, with random weights of width 512,
also with two references beside the template.

Pages are int8 keyframes, as in `denoiser_step`. The bound is the ratio of floating-point operations. Exact and
mask-aware steps take turns in one process; figures are medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from diffusers.utils.logging import set_verbosity_error
from torch import Tensor

from benchmarks.command import command
from benchmarks.micro.denoiser_step import FLUX_SHAPE
from benchmarks.micro.rows import Call, exact_row, operations_bound, pages_between, primed_entry
from benchmarks.report import Value, print_report
from benchmarks.turns import medians, timed
from model_executor.models.base import Row
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.models.transformer.flux2_transformer import Flux2Transformer
from model_executor.models.transformer.flux_transformer import FluxKontextTransformer, FluxTransformer
from model_executor.models.transformer.qwen_transformer import QwenEditTransformer, QwenTransformer
from model_executor.models.transformer.sd3_transformer import SD3Transformer
from model_executor.models.transformer.z_image_transformer import ZImageTransformer

SIDE, TEXT_TOKENS = 32, 64
RATIO = 0.1
HEADS: dict[str, Any] = {"attention_head_dim": 64, "num_attention_heads": 8}
"""Heads that make a hidden size of 512, as most configurations name them."""


@dataclass(frozen=True)
class Blocks:
    """A family's blocks. widths: of latents, condition, prompt and pooled prompt. image_blocks: blocks that compute
    image tokens alone, of all `num_blocks`. references: pictures of the same size that it sees beside the template."""

    denoiser: type[Denoiser]
    make: Callable[[], Any]
    widths: tuple[int, int, int, int]
    num_blocks: int
    image_blocks: int = 0
    references: int = 0

    def bound(self, active: int) -> float:
        """Operations of an exact step over those of one with this many active tokens."""
        image = SIDE**2 * (self.denoiser.rows_per_token + self.references)
        return operations_bound(image, active, TEXT_TOKENS, self.num_blocks, self.image_blocks)


def _qwen(**options: Any) -> QwenImageTransformer2DModel:
    """Qwen-Image's blocks. options: further fields of their configuration."""
    return QwenImageTransformer2DModel(
        num_layers=12, joint_attention_dim=256, axes_dims_rope=(16, 24, 24), **HEADS, **options
    )


FAMILIES = {
    "flux-fill": Blocks(FluxTransformer, lambda: FluxTransformer2DModel(**FLUX_SHAPE), (64, 320, 256, 256), 12),
    "flux-kontext": Blocks(
        FluxKontextTransformer,
        lambda: FluxTransformer2DModel(**FLUX_SHAPE | {"in_channels": 64}),
        (64, 64, 256, 256),
        12,
    ),
    "flux2-klein": Blocks(
        Flux2Transformer,
        lambda: Flux2Transformer2DModel(
            num_layers=4,
            num_single_layers=8,
            joint_attention_dim=256,
            axes_dims_rope=(16, 16, 16, 16),
            guidance_embeds=False,
            **HEADS,
        ),
        (128, 128, 256, 0),
        12,
    ),
    "sd3": Blocks(
        SD3Transformer,
        lambda: SD3Transformer2DModel(
            sample_size=64,
            num_layers=12,
            joint_attention_dim=256,
            caption_projection_dim=512,
            pooled_projection_dim=256,
            pos_embed_max_size=64,
            qk_norm="rms_norm",
            **HEADS,
        ),
        (64, 0, 256, 256),
        12,
    ),
    "qwen-image": Blocks(
        QwenTransformer,
        _qwen,
        (64, 0, 256, 0),
        12,
    ),
    "qwen-image-edit": Blocks(
        QwenEditTransformer,
        _qwen,
        (64, 64, 256, 0),
        12,
    ),
    "qwen-image-edit-plus": Blocks(
        QwenEditTransformer,
        lambda: _qwen(zero_cond_t=True),
        (64, 64, 256, 0),
        12,
    ),
    "z-image": Blocks(
        ZImageTransformer,
        lambda: ZImageTransformer2DModel(
            dim=512, n_layers=12, n_refiner_layers=2, n_heads=8, n_kv_heads=8, cap_feat_dim=256, axes_dims=[16, 24, 24]
        ),
        (64, 0, 256, 0),
        14,
        image_blocks=2,
    ),
}
"""Family -> blocks like those of its checkpoints."""

FAMILIES |= {
    f"{name}-references": replace(FAMILIES[name], references=2) for name in ("flux2-klein", "qwen-image-edit-plus")
}


class Bench:
    """A family's steps, and the pages of its template."""

    def __init__(self, blocks: Blocks, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        with torch.inference_mode(False):
            module = blocks.make().to(dtype).eval().requires_grad_(False)
        self._denoiser = blocks.denoiser(module, 1000, owns_module=True)
        self._row = _row(self._denoiser, blocks, dtype)
        near, far = (primed_entry(self._denoiser, self._row, sigma) for sigma in (0.75, 0.5))
        self._pages = pages_between(self._denoiser, self._row, near, far)

    def exact(self) -> object:
        return self._denoiser.forward([self._row])

    def edit(self, number: int) -> Call:
        """A step with this many active tokens."""
        tokens = torch.randperm(SIDE**2, generator=torch.Generator().manual_seed(0))[:number].sort().values
        row = replace(self._row, active=tokens, pages=self._pages)
        return lambda: self._denoiser.forward([row])


def _row(denoiser: Denoiser, blocks: Blocks, dtype: torch.dtype) -> Row:
    """An exact row, the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    return exact_row(denoiser, SIDE, TEXT_TOKENS, blocks.widths, draw, references=blocks.references)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, dtype="float32", threads=1, rounds=7)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    set_verbosity_error()
    rows, result = list[tuple[str, str]](), dict[str, Value]()
    with torch.inference_mode():
        for name in args.only:
            line, figures = measured(FAMILIES[name], args)
            rows.append((name, line))
            result |= {f"{name}_{figure}": value for figure, value in figures.items()}
    title = (
        f"Denoiser step of each family's blocks, width 512, mask ratio {RATIO}; {args.dtype}, {args.threads} thread(s)"
    )
    print_report(title, rows, {"benchmark": "family_steps", "dtype": args.dtype} | result, args.output)


def measured(blocks: Blocks, args: argparse.Namespace) -> tuple[str, dict[str, Value]]:
    """A line of the table, and its figures."""
    active = round(RATIO * SIDE**2)
    bench, bound = Bench(blocks, getattr(torch, args.dtype)), blocks.bound(active)
    found = medians({"exact": timed(bench.exact), "masked": timed(bench.edit(active))}, args.rounds)
    exact, masked = found["exact"], found["masked"]
    share = exact / masked / bound
    line = f"exact {exact * 1e3:8.1f} ms  masked {masked * 1e3:7.1f} ms   {exact / masked:5.2f}x  bound {bound:5.2f}x"
    figures: dict[str, Value] = {"exact_ms": exact * 1e3, "masked_ms": masked * 1e3, "bound": bound, "share": share}
    return f"{line}  share {share:4.2f}", figures


if __name__ == "__main__":
    main()
