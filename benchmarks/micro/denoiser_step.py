"""One denoising step, mask-aware against exact.

Shapes: small blocks like FLUX's with random weights, and the embedded model; with `--shape`, a pair of blocks of the
width that a family's checkpoints have. Pages are int8 keyframes, dequantised and interpolated within the step. Every
time is compared with diffusers' own forward of the same module, which also shows what our products and batching gain,
and with our exact step. Modulation is at hand, which a run computes once for all of its steps. The bound is the ratio
of floating-point operations. All take turns in one process; figures are medians.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.utils.logging import set_verbosity_error
from torch import Tensor

import model_executor
from benchmarks.command import command
from benchmarks.report import Value, print_report
from benchmarks.turns import medians, timed
from model_executor.models.base import PrimeRow, Row
from model_executor.models.denoiser import Denoiser
from model_executor.models.flux_transformer import FluxTransformer
from model_executor.models.qwen_transformer import QwenEditTransformer
from model_executor.models.sd3_transformer import SD3Transformer
from model_executor.models.vae_family import unpack
from model_executor.pages import Pages

RATIOS = (0.05, 0.1, 0.2, 0.35, 0.5, 1.0)
BATCH = 8
TOKEN_SIDE = 16  # px
WEIGHT = 0.37
"""Where between two keyframes the measured step lies."""

Timed = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """A module and the sizes of its measured step."""

    name: str
    module: Any
    grid: tuple[int, int]
    text_tokens: int
    denoiser: type[Denoiser] = FluxTransformer

    @property
    def image_tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    def bound(self, active: Sequence[int]) -> float:
        """Operations of exact steps over those of steps with so many active tokens. Linear layers and attention over
        all keys both grow with the computed tokens."""
        exact = (self.denoiser.rows_per_token * self.image_tokens + self.text_tokens) * len(active)
        return exact / sum(number + self.text_tokens for number in active)


class Bench:
    """A shape's inputs, template pages and timed calls."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape = shape
        self._diffusers = copy.deepcopy(shape.module).to(dtype).eval().requires_grad_(False)
        self._ours = shape.denoiser(shape.module.to(dtype).eval().requires_grad_(False), 1000)
        self._dtype = dtype
        row = random_row(self._ours, shape.grid, shape.text_tokens, dtype)
        table = self._ours.modulation(row.pooled_prompt_embeds, row.guidance_scale, row.sigma[None], 1)
        self._row = replace(row, modulation=table)
        self._entries = [primed_entry(self._ours, self._row, sigma) for sigma in (0.75, 0.5)]

    def exact(self) -> object:
        return self._ours.forward([self._row])

    def diffusers(self, batch: int = 1) -> object:
        """The module's own forward, dense."""
        row, rows, columns = self._row, *self.shape.grid
        if self.shape.denoiser is SD3Transformer:
            return self._diffusers(
                hidden_states=unpack(row.latents, self.shape.grid).expand(batch, -1, -1, -1),
                timestep=row.sigma.expand(batch) * 1000,
                pooled_projections=row.pooled_prompt_embeds.expand(batch, -1),
                encoder_hidden_states=row.prompt_embeds.expand(batch, -1, -1),
                return_dict=False,
            )
        if self.shape.denoiser is QwenEditTransformer:
            return self._diffusers(
                hidden_states=torch.cat([row.latents, row.condition]).expand(batch, -1, -1),
                timestep=row.sigma.expand(batch),
                encoder_hidden_states=row.prompt_embeds.expand(batch, -1, -1),
                img_shapes=[[(1, rows, columns)] * 2] * batch,
                return_dict=False,
            )
        ids = torch.cartesian_prod(torch.zeros(1), torch.arange(float(rows)), torch.arange(float(columns)))
        return self._diffusers(
            hidden_states=torch.cat([row.latents, row.condition], dim=1).expand(batch, -1, -1),
            timestep=row.sigma.expand(batch).to(self._dtype),
            pooled_projections=row.pooled_prompt_embeds.expand(batch, -1),
            encoder_hidden_states=row.prompt_embeds.expand(batch, -1, -1),
            txt_ids=torch.zeros(self.shape.text_tokens, 3),
            img_ids=ids,
            return_dict=False,
        )

    def edits(self, active: Sequence[int]) -> Timed:
        """One step of a request for each number of active tokens; every request has a template of its own."""
        rows = [self._edit(number, seed) for seed, number in enumerate(active)]
        return lambda: self._ours.forward(rows)

    def _edit(self, number: int, seed: int) -> Row:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randperm(self.shape.image_tokens, generator=generator)[:number].sort().values
        near, far = (entry.clone() for entry in self._entries)
        pages = Pages(self._ours.page_layout("int8"), self.shape.image_tokens, near, far, WEIGHT)
        return replace(self._row, active=tokens, pages=pages)


def random_row(denoiser: Denoiser, grid: tuple[int, int], text_tokens: int, dtype: torch.dtype = torch.float32) -> Row:
    """An exact row with random inputs."""
    config, generator = denoiser.module.config, torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    width, image_tokens = config.out_channels * config.patch_size**2, grid[0] * grid[1]
    beside = config.in_channels * config.patch_size**2 - width
    return Row(
        latents=draw(image_tokens, width),
        condition=draw(image_tokens, width if denoiser.rows_per_token == 2 else beside),
        prompt_embeds=draw(text_tokens, config.joint_attention_dim),
        pooled_prompt_embeds=draw(config.get("pooled_projection_dim", 0)),
        sigma=torch.tensor(0.6),
        guidance_scale=1.0,
        grid=grid,
    )


def primed_entry(transformer: Denoiser, row: Row, sigma: float) -> Tensor:
    """The int8 entry of a row's own inputs at a keyframe, uint8 [entry bytes]."""
    entry = torch.empty(transformer.page_layout("int8").entry_bytes(len(row.latents)), dtype=torch.uint8)
    template = PrimeRow(
        latents=row.latents,
        condition=row.condition,
        prompt_embeds=row.prompt_embeds,
        pooled_prompt_embeds=row.pooled_prompt_embeds,
        sigma=torch.tensor(sigma),
        guidance_scale=row.guidance_scale,
        grid=row.grid,
        hidden=None,
        entry=entry,
    )
    transformer.prime([template], (0, transformer.num_pages))
    return entry


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, dtype="float32", threads=1, rounds=7)
    parser.add_argument("--shape", choices=WIDE, help="measure this one only, at mask ratio 0.2")
    parser.add_argument("--side", type=int, default=512, help="with --shape: the square picture's, in pixels")
    parser.add_argument("--skip-batch", action="store_true", help=f"leave out the batches of {BATCH}")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    set_verbosity_error()
    dtype = getattr(torch, args.dtype)
    with torch.inference_mode():
        if args.shape:
            measure_steps(Bench(WIDE[args.shape](args.side // TOKEN_SIDE), dtype), args, [0.2])
            return
        for shape in (flux_shape(), embedded_shape()):
            measure_steps(Bench(shape, dtype), args, RATIOS)
        if not args.skip_batch:
            measure_batch(Bench(flux_shape(), dtype), args)


def _shape(
    name: str,
    make: Callable[[], Any],
    grid: tuple[int, int],
    text_tokens: int,
    denoiser: type[Denoiser] = FluxTransformer,
) -> Shape:
    """Of a module with random weights, or its own."""
    torch.manual_seed(0)
    with torch.inference_mode(False):
        return Shape(name, make(), grid, text_tokens, denoiser)


def flux_shape() -> Shape:
    """Blocks as FLUX has them, hidden size 512, random weights."""
    make = partial(
        FluxTransformer2DModel,
        in_channels=384,
        out_channels=64,
        num_layers=4,
        num_single_layers=8,
        attention_head_dim=64,
        num_attention_heads=8,
        joint_attention_dim=256,
        pooled_projection_dim=256,
        guidance_embeds=False,
        axes_dims_rope=(16, 24, 24),
    )
    return _shape("FLUX-shaped, hidden 512, 4 + 8 blocks", make, (32, 32), 64)


def embedded_shape() -> Shape:
    """The embedded model at 256 x 256 pixels."""
    path = Path(model_executor.__path__[0]) / "embedded" / "transformer"
    make = partial(FluxTransformer2DModel.from_pretrained, path)
    return _shape("embedded model, hidden 256, 2 + 5 blocks", make, (16, 16), 24)


def flux_1_shape(side: int) -> Shape:
    """One block of each kind as FLUX.1 has them, without Fill's condition."""
    make = partial(FluxTransformer2DModel, out_channels=64, num_layers=1, num_single_layers=1)
    return _shape("FLUX.1, hidden 3072, 1 + 1 blocks", make, (side, side), 512)


def sd3_shape(name: str, heads: int, dual: tuple[int, ...], qk_norm: str | None, side: int) -> Shape:
    """The first and the last kind of block of Stable Diffusion 3; dual: which of the two has a second attention."""
    make = partial(
        SD3Transformer2DModel,
        num_layers=2,
        num_attention_heads=heads,
        caption_projection_dim=64 * heads,
        pos_embed_max_size=384,
        dual_attention_layers=dual,
        qk_norm=qk_norm,
    )
    return _shape(f"SD {name}, hidden {64 * heads}, 2 blocks", make, (side, side), 333, SD3Transformer)


def qwen_edit_shape(side: int) -> Shape:
    """Two blocks of Qwen-Image-Edit; text with the picture's 324 tokens."""
    make, grid = partial(QwenImageTransformer2DModel, num_layers=2), (side, side)
    return _shape("Qwen-Image-Edit, hidden 3072, 2 blocks", make, grid, 351, QwenEditTransformer)


WIDE: dict[str, Callable[[int], Shape]] = {
    "flux.1": flux_1_shape,
    "sd3-medium": partial(sd3_shape, "3 medium", 24, (), None),
    "sd3.5-medium": partial(sd3_shape, "3.5 medium", 24, (0,), "rms_norm"),
    "sd3.5-large": partial(sd3_shape, "3.5 large", 38, (), "rms_norm"),
    "qwen-image-edit": qwen_edit_shape,
}
"""Name -> shape, given the tokens of a side."""


def measure_steps(bench: Bench, args: argparse.Namespace, ratios: Sequence[float]) -> None:
    """One request at each mask ratio."""
    actives = [round(ratio * bench.shape.image_tokens) for ratio in ratios]
    calls = [bench.diffusers, bench.exact, *(bench.edits([number]) for number in actives)]
    diffusers, exact, *steps = _medians(calls, args.rounds)
    rows = [("diffusers, exact", _ms(diffusers)), ("Stencil, exact", f"{_ms(exact)}   {diffusers / exact:5.2f}x")]
    result: dict[str, Value] = {"diffusers_ms": diffusers * 1e3, "exact_ms": exact * 1e3}
    for ratio, number, step in zip(ratios, actives, steps, strict=True):
        bound = bench.shape.bound([number])
        rows.append((f"ratio {ratio}, {number} active", compared(step, diffusers, exact, bound)))
        result |= {f"step_{ratio}_ms": step * 1e3, f"x_diffusers_{ratio}": diffusers / step}
        result |= {f"x_exact_{ratio}": exact / step, f"bound_{ratio}": bound}
    _print(bench.shape.name, rows, result, args)


def measure_batch(bench: Bench, args: argparse.Namespace) -> None:
    """Requests of different mask ratios in one batch against diffusers' dense batch."""
    ratios = np.clip(np.random.default_rng(0).gamma(1.6, 0.11, BATCH), 0.02, 0.9)
    ratios *= 0.13 / ratios.mean()
    actives = [round(ratio * bench.shape.image_tokens) for ratio in ratios]
    edits = bench.edits(actives)
    diffusers, exact, step = _medians([lambda: bench.diffusers(BATCH), bench.exact, edits], args.rounds)
    bound = bench.shape.bound(actives)
    rows = [
        (f"diffusers, dense batch of {BATCH}", _ms(diffusers)),
        (f"Stencil, {BATCH} exact steps one by one", _ms(BATCH * exact)),
        (f"mean ratio {ratios.mean():.2f}", compared(step, diffusers, BATCH * exact, bound)),
    ]
    result: dict[str, Value] = {
        "diffusers_ms": diffusers * 1e3,
        "exact_ms": BATCH * exact * 1e3,
        "step_ms": step * 1e3,
        "x_diffusers": diffusers / step,
        "x_exact": BATCH * exact / step,
        "bound": bound,
    }
    _print(f"{bench.shape.name}, batch of {BATCH}", rows, result, args)


def compared(step: float, diffusers: float, exact: float, bound: float) -> str:
    """A step's milliseconds, its speed against both, the bound, and the share of it that the second reaches."""
    speed = f"{diffusers / step:5.2f}x diffusers  {exact / step:5.2f}x exact"
    return f"{_ms(step)}   {speed}  bound {bound:5.2f}x  share {exact / step / bound:4.2f}"


def _medians(calls: Sequence[Timed], rounds: int) -> list[float]:
    """Seconds of each call, in turns."""

    def second(call: Timed) -> float:
        call()  # brings its own weights and pages into the caches
        return timed(call)()

    return list(medians({number: partial(second, call) for number, call in enumerate(calls)}, rounds).values())


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:8.1f} ms"


def _print(name: str, rows: Sequence[tuple[str, str]], result: dict[str, Value], args: argparse.Namespace) -> None:
    title = f"Denoiser step, {name}; {args.dtype}, {args.threads} thread(s), int8 pages between two keyframes"
    settings = {"benchmark": "denoiser_step", "shape": name, "dtype": args.dtype, "threads": args.threads}
    print_report(title, rows, settings | result, args.output)


if __name__ == "__main__":
    main()
