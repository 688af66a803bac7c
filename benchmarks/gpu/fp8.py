"""Products in 8-bit floats with a scale for each row, against bfloat16: what an option of that kind could gain.

Only times and the error of a product: what it does to pictures cannot be judged with random weights. The engine has no
such option.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Call
from benchmarks.gpu.report import Figures

LARGEST = 448.0  # of torch.float8_e4m3fn


@torch.inference_mode()
def run(bench: Bench) -> None:
    """Products of FLUX's blocks, over the tokens of an exact step and of a masked one."""
    size, config = bench.size.flux, bench.size.flux.transformer
    hidden = config.get("num_attention_heads", 24) * config.get("attention_head_dim", 128)
    shapes = {"qkv": (hidden, 3 * hidden), "mlp in": (hidden, 4 * hidden), "mlp out": (4 * hidden, hidden)}
    masked = round(0.1 * size.image_tokens) + size.text_tokens
    products: list[Figures] = []
    for tokens in (masked, size.image_tokens + size.text_tokens):
        for name, (inputs, outputs) in shapes.items():
            figures = _product(bench, tokens, inputs, outputs)
            products.append({"name": name, "tokens": tokens, "inputs": inputs, "outputs": outputs} | figures)
            bench.report.put("fp8", products=products)


def _product(bench: Bench, tokens: int, inputs: int, outputs: int) -> Figures:
    """Microseconds, and the difference's norm over the product's."""
    x, weight = (torch.randn(rows, inputs, device=bench.device).bfloat16() for rows in (tokens, outputs))
    packed, scales = quantised(weight)
    rows, row_scales = quantised(x)
    product = partial(scaled_product, rows, packed, row_scales, scales)
    calls: dict[str, Call] = {
        "bfloat16": lambda: x @ weight.T,
        "product": product,
        "with_quantising": lambda: scaled_product(*_interleaved(quantised(x), (packed, scales))),
    }
    seconds = bench.medians(calls)
    exact = x.float() @ weight.float().T
    error = (product().float() - exact).norm() / exact.norm()
    return {f"{name}_us": 1e6 * taken for name, taken in seconds.items()} | {"error": float(error)}


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values in float8_e4m3fn, float32 scales [rows, 1]) of a matrix."""
    scales = x.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / LARGEST
    return (x / scales).to(torch.float8_e4m3fn), scales


def scaled_product(x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor) -> Tensor:
    """The product of 8-bit matrices with their scales: bfloat16 [rows, outputs]."""
    product: Tensor = torch._scaled_mm(
        x, weight.T, scale_a=x_scales, scale_b=weight_scales.T, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return product


def _interleaved(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x[0], weight[0], x[1], weight[1]
