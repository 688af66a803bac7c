"""How many kernels a step launches: launching takes the host longer than the GPU takes to run many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from launches import META, LaunchCounter

from benchmarks.micro.rows import pages_between, transformer_row
from model_executor.kernels.gpu_attention import attend_alike
from model_executor.kernels.gpu_operators import TritonOperators
from model_executor.models.base import Row
from model_executor.models.flux_transformer import FluxTransformer

SIDE, TEXT, ACTIVE = 64, 512, 410
"""Image tokens a side, text tokens, and the active tokens at mask ratio 0.1."""


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    pytest.importorskip("triton")
    from model_executor.kernels import triton_kernels

    return triton_kernels


@pytest.fixture(scope="module")
def module() -> Any:
    """FLUX.1-dev's transformer without weights."""
    with META:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return FluxTransformer2DModel(guidance_embeds=True).eval()
        finally:
            torch.set_default_dtype(torch.float32)


@torch.inference_mode()
def launches(module: Any, kernels: ModuleType, active: Sequence[int | None]) -> Counter[str]:
    """Of a step in which each request has this many active tokens, None for all."""
    counter = LaunchCounter()
    denoiser = FluxTransformer(module, 1000, TritonOperators(counter.kernels(kernels)).attending(attend_alike))
    denoiser._rotary_table = lambda text, grid: torch.empty(  # type: ignore[assignment]
        text + grid[0] * grid[1], 1, 1, 64, dtype=torch.complex64, device=META
    )
    exact = transformer_row(denoiser, SIDE, TEXT, lambda *s: torch.empty(s, device=META, dtype=torch.bfloat16), 3.5)
    entry = torch.empty(denoiser.page_layout("int8").entry_bytes(SIDE**2), dtype=torch.uint8, device=META)
    pages = pages_between(denoiser, exact, entry, entry)
    rows = [exact if number is None else masked(exact, number, pages) for number in active]
    denoiser.forward(rows)  # index tables that are kept for all steps
    counter.counts.clear()
    with counter:
        denoiser.forward(rows)
    return counter.counts


def masked(row: Row, number: int, pages: Any) -> Row:
    return replace(row, active=torch.empty(number, dtype=torch.int64, device=META), pages=pages)


@pytest.mark.parametrize(
    ("active", "budget"),
    [([ACTIVE], 520), ([ACTIVE] * 8, 620), ([None], 520)],
    ids=["masked", "8 masked", "exact"],
)
def test_a_flux_step_stays_within_its_budget(
    module: Any, kernels: ModuleType, active: Sequence[int | None], budget: int
) -> None:
    counts = launches(module, kernels, active)
    assert counts.total() <= budget, counts.most_common()
