"""One denoising step, mask-aware against exact: small blocks like FLUX's with random weights, and the embedded model.

Pages are int8 keyframes, dequantised and interpolated within the step. Every time is compared with our exact step, and
with diffusers' own forward of the same module, which also shows what our products and batching gain. Modulation is
precomputed, as a run computes it once for all of its steps. The bound is the ratio of floating-point operations. All
take turns in one process; figures are medians.
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
from diffusers.utils.logging import set_verbosity_error
from torch import Tensor

import model_executor
from benchmarks.command import command
from benchmarks.micro.rows import Call, diffusers_step, pages_between, primed_entry, transformer_row
from benchmarks.report import Value, print_report
from benchmarks.turns import medians, timed
from model_executor.models.base import Row
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.models.transformer.flux_transformer import FluxTransformer

RATIOS = (0.05, 0.1, 0.2, 0.35, 0.5, 1.0)
BATCH = 8
FLUX_SHAPE: dict[str, Any] = {
    "in_channels": 384,
    "out_channels": 64,
    "num_layers": 4,
    "num_single_layers": 8,
    "attention_head_dim": 64,
    "num_attention_heads": 8,
    "joint_attention_dim": 256,
    "pooled_projection_dim": 256,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 24, 24),
}
"""Blocks as FLUX has them, hidden size 512."""


@dataclass(frozen=True)
class Shape:
    """A module and the sizes of its measured step."""

    name: str
    module: Any
    side: int  # image tokens of the picture's side
    text_tokens: int

    @property
    def image_tokens(self) -> int:
        return self.side**2

    def bound(self, active: Sequence[int]) -> float:
        """Operations of exact steps over those of steps with these active tokens. Linear layers and attention over all
        keys both grow with the computed tokens."""
        exact = (self.image_tokens + self.text_tokens) * len(active)
        return exact / sum(number + self.text_tokens for number in active)


class Bench:
    """A shape's inputs, template pages and timed calls."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape = shape
        self._diffusers = copy.deepcopy(shape.module).to(dtype).eval().requires_grad_(False)
        self._ours = FluxTransformer(shape.module.to(dtype).eval().requires_grad_(False), 1000)
        self._row = random_row(self._ours, shape, dtype)
        self._entries = [primed_entry(self._ours, self._row, sigma) for sigma in (0.75, 0.5)]

    def exact(self) -> object:
        return self._ours.forward([self._row])

    def diffusers(self, batch: int = 1) -> Callable[[], tuple[Tensor]]:
        return diffusers_step(self._diffusers, self._row, batch)

    def edits(self, active: Sequence[int]) -> Call:
        """One step of a request for each number of active tokens; every request has a template of its own."""
        rows = [self._edit(number, seed) for seed, number in enumerate(active)]
        return lambda: self._ours.forward(rows)

    def _edit(self, number: int, seed: int) -> Row:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randperm(self.shape.image_tokens, generator=generator)[:number].sort().values
        near, far = (entry.clone() for entry in self._entries)
        return replace(self._row, active=tokens, pages=pages_between(self._ours, self._row, near, far))


def random_row(denoiser: Denoiser, shape: Shape, dtype: torch.dtype = torch.float32) -> Row:
    """An exact row, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return transformer_row(
        denoiser, shape.side, shape.text_tokens, lambda *size: torch.randn(size, generator=generator).to(dtype)
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, dtype="float32", threads=1, rounds=7)
    parser.add_argument("--skip-batch", action="store_true", help=f"leave out the batches of {BATCH}")
    parser.add_argument("--dtypes", action="store_true", help="only the steps of both dtypes of a CPU, FLUX-shaped")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    set_verbosity_error()
    dtype = getattr(torch, args.dtype)
    with torch.inference_mode():
        if args.dtypes:
            return measure_dtypes(args)
        for shape in (flux_shape(), embedded_shape()):
            measure_steps(Bench(shape, dtype), args)
        if not args.skip_batch:
            measure_batch(Bench(flux_shape(), dtype), args)


def flux_shape() -> Shape:
    """Random weights."""
    return _shape("FLUX-shaped, hidden 512, 4 + 8 blocks", partial(FluxTransformer2DModel, **FLUX_SHAPE), 32, 64)


def embedded_shape() -> Shape:
    """The embedded model at 256 x 256 pixels."""
    path = Path(model_executor.__path__[0]) / "embedded" / "transformer"
    make = partial(FluxTransformer2DModel.from_pretrained, path)
    return _shape("embedded model, hidden 256, 2 + 5 blocks", make, 16, 24)


def _shape(name: str, make: Callable[[], Any], side: int, text_tokens: int) -> Shape:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        return Shape(name, make(), side, text_tokens)


def measure_steps(bench: Bench, args: argparse.Namespace) -> None:
    """One request at each mask ratio."""
    actives = [round(ratio * bench.shape.image_tokens) for ratio in RATIOS]
    calls = [bench.diffusers(), bench.exact, *(bench.edits([number]) for number in actives)]
    diffusers, exact, *steps = _medians(calls, args.rounds)
    rows = [("diffusers, exact", _ms(diffusers)), ("Stencil, exact", f"{_ms(exact)}   {diffusers / exact:5.2f}x")]
    result: dict[str, Value] = {"diffusers_ms": diffusers * 1e3, "exact_ms": exact * 1e3}
    for ratio, number, step in zip(RATIOS, actives, steps, strict=True):
        bound = bench.shape.bound([number])
        rows.append((f"ratio {ratio}, {number} active", compared(step, diffusers, exact, bound)))
        result |= {f"step_{ratio}_ms": step * 1e3, f"x_diffusers_{ratio}": diffusers / step}
        result |= {f"x_exact_{ratio}": exact / step, f"bound_{ratio}": bound}
    _print(bench.shape.name, rows, result, args)


def measure_dtypes(args: argparse.Namespace) -> None:
    """Steps in float32 and in bfloat16, in turns: what `--dtype auto` chooses between on a CPU."""
    names = "float32", "bfloat16"
    benches = [Bench(flux_shape(), getattr(torch, name)) for name in names]
    actives = [round(ratio * benches[0].shape.image_tokens) for ratio in RATIOS]
    calls = [call for bench in benches for call in (bench.exact, *(bench.edits([number]) for number in actives))]
    seconds = _medians(calls, args.rounds)
    half = len(seconds) // 2
    rows, result = [], {"benchmark": "denoiser_dtypes", "threads": args.threads}
    for name, full, short in zip(("exact", *map(str, RATIOS)), seconds[:half], seconds[half:], strict=True):
        rows.append((name if name == "exact" else f"ratio {name}", f"{_ms(full)} {_ms(short)}   {full / short:5.2f}x"))
        result |= {f"float32_{name}_ms": full * 1e3, f"bfloat16_{name}_ms": short * 1e3}
    title = f"Denoiser step, {benches[0].shape.name}; float32, bfloat16, float32 by bfloat16; {args.threads} thread(s)"
    print_report(title, rows, result, args.output)


def measure_batch(bench: Bench, args: argparse.Namespace) -> None:
    """Requests of different mask ratios in one batch against diffusers' dense batch."""
    ratios = np.clip(np.random.default_rng(0).gamma(1.6, 0.11, BATCH), 0.02, 0.9)
    ratios *= 0.13 / ratios.mean()
    actives = [round(ratio * bench.shape.image_tokens) for ratio in ratios]
    edits = bench.edits(actives)
    diffusers, exact, step = _medians([bench.diffusers(BATCH), bench.exact, edits], args.rounds)
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


def _medians(calls: Sequence[Call], rounds: int) -> list[float]:
    """Seconds of each call, in turns."""

    def second(call: Call) -> float:
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
