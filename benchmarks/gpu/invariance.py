"""The section about `--batch-invariant`: whether it holds at FLUX's size, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.bench import Bench, Call
from benchmarks.gpu.flux import FluxBench
from benchmarks.gpu.report import Figures
from model_executor.kernels.linear import Linear, gpu_linear
from model_executor.kernels.linear_groups import ProductGroup
from model_executor.kernels.operators import Operators, chosen_operators

RATIO = 0.1
"""Mask ratio of the lone edit."""

PRODUCT_ROWS = (1, 922, 4608)
"""Rows of timed products: a modulation's, those of an edit at mask ratio 0.1 with its text, and an exact step's."""

Steps = Mapping[str, Callable[[], Sequence[Tensor]]]


@torch.inference_mode()
def run(bench: Bench, flux: FluxBench) -> None:
    """Steps with the option and without it, in turns; how many numbers of an edit change by its company; products
    alone. On a CPU the option changes nothing, and there are no products to compare."""
    put, operators = (
        partial(bench.report.put, "invariance"),
        chosen_operators("auto", bench.device, batch_invariant=True),
    )
    entries = [flux.entry() for _ in flux.keyframes()]
    flux.prime(entries)()
    twin = copy(flux)
    twin.denoiser = flux.denoiser.computing_with(operators)
    with _products_by(flux, operators.linear):
        differing = _differing(twin, entries)
    put(ratio=RATIO, edits=len(flux.size.mixed), differing=differing, differing_without=_differing(flux, entries))
    calls: dict[str, Call] = {}
    for name, step in _steps(flux, entries).items():
        calls[f"{name}_without"] = step
    for name, step in _steps(twin, entries).items():
        calls[name] = partial(_with_products, flux, operators.linear, step)
    put(**{f"{name}_ms": 1e3 * seconds for name, seconds in bench.medians(calls).items()})
    if bench.device.type == "cuda":
        put(products=_products(bench, flux, operators))


def _steps(flux: FluxBench, entries: Sequence[Tensor]) -> Steps:
    """A masked and an exact step of one edit, and one of a batch of edits."""
    pages, mixed = (entries[0], entries[1]), flux.size.mixed
    calls = flux.edits(RATIO, [pages]), flux.exact(), flux.mixed(mixed, [pages] * len(mixed))
    return dict(zip(("masked", "exact", "mixed"), calls, strict=True))  # type: ignore[arg-type]


def _differing(flux: FluxBench, entries: Sequence[Tensor]) -> float:
    """The share of the numbers predicted in a batch that differ from those of each edit alone."""
    pages, mixed = (entries[0], entries[1]), flux.size.mixed
    together = _steps(flux, entries)["mixed"]()
    alone = [output for ratio in mixed for output in _outputs(flux.edits(ratio, [pages]))]
    differ = sum(int((ours != theirs).sum()) for ours, theirs in zip(together, alone, strict=True))
    return differ / sum(output.numel() for output in alone)


def _outputs(call: Call) -> Sequence[Tensor]:
    outputs: Sequence[Tensor] = call()  # type: ignore[assignment]
    return outputs


def _with_products(flux: FluxBench, linear: Linear, call: Call) -> object:
    with _products_by(flux, linear):
        return call()


@contextmanager
def _products_by(flux: FluxBench, linear: Linear) -> Iterator[None]:
    """Have the denoiser's layers run by this function; a second denoiser would need its weights a second time."""
    groups = [group for group in flux.denoiser._groups.values() if isinstance(group, ProductGroup)]
    before = [group._linear for group in groups]
    for group in groups:
        group._linear = linear
    try:
        yield
    finally:
        for group, its in zip(groups, before, strict=True):
            group._linear = its


def _products(bench: Bench, flux: FluxBench, operators: Operators) -> Figures:
    """Milliseconds of one product by its rows, inputs and outputs: ours and cuBLAS's; and their mean difference."""
    hidden = flux.module.config.num_attention_heads * flux.module.config.attention_head_dim
    figures: Figures = {}
    for width, columns in ((hidden, 4 * hidden), (5 * hidden, hidden)):
        layer = torch.nn.Linear(width, columns, device=bench.device, dtype=bench.dtype)
        for rows in PRODUCT_ROWS:
            x = bench.draw(rows, width)
            ours, theirs = partial(operators.linear, layer, x), partial(gpu_linear, layer, x)
            seconds = bench.medians({"ours": ours, "theirs": theirs})
            figures[f"{rows} x {width} x {columns}"] = {
                "ms": 1e3 * seconds["ours"],
                "cublas_ms": 1e3 * seconds["theirs"],
                "tflops": 2e-12 * rows * width * columns / seconds["ours"],
                "mean_difference": float(F.l1_loss(ours().float(), theirs().float())),
            }
    return figures
