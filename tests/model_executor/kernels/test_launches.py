"""How many kernels a step launches: launching takes the host longer than the GPU takes to run many of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from launches import META, LaunchCounter
from torch import Tensor

from benchmarks.gpu.family_steps import KINDS
from benchmarks.gpu.sizes import FULL
from benchmarks.micro.rows import exact_row, pages_between, transformer_row
from model_executor.kernels import gpu_pages, gpu_tables
from model_executor.kernels.gpu_attention import attend_alike
from model_executor.kernels.gpu_operators import TritonOperators
from model_executor.kernels.held import holding
from model_executor.models.base import ModulationInputs, Row
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.models.transformer.flux_transformer import FluxTransformer
from model_executor.models.transformer.z_image_transformer import ZImageTransformer
from model_executor.page_cache.pages import PageTable

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


Step = tuple[Denoiser, Row]
"""A denoiser, and a row that computes all tokens."""


@torch.inference_mode()
def make_step(module: Any, kernels: ModuleType, counter: LaunchCounter) -> Step:
    denoiser = FluxTransformer(module, 1000, TritonOperators(counter.kernels(kernels)).attending(attend_alike))
    table = torch.empty(TEXT + SIDE**2, 1, 1, 64, dtype=torch.complex64, device=META)
    denoiser._rotary_table = lambda *_: table  # type: ignore[assignment,misc]
    draw = partial(torch.empty, device=META, dtype=torch.bfloat16)
    return denoiser, transformer_row(denoiser, SIDE, TEXT, lambda *shape: draw(shape), 3.5)


@torch.inference_mode()
def make_family_step(name: str, kernels: ModuleType, counter: LaunchCounter) -> Step:
    """A step of a family's published shape, with all that a run computes once."""
    kind, size = KINDS[name], FULL.families[name]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode(False), META:
            module = kind.make(**size.transformer).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)
    denoiser = kind.denoiser(module, 1000, TritonOperators(counter.kernels(kernels)).attending(attend_alike))
    tokens = size.text_tokens + denoiser.rows_per_token * size.side**2
    tables = {number: torch.empty(number, 1, 1, 64, dtype=torch.complex64, device=META) for number in (tokens, 128)}
    denoiser._rotary_table = lambda *_: tables[tokens]  # type: ignore[assignment,misc]
    if isinstance(denoiser, ZImageTransformer):
        denoiser._prompt_rotary = lambda number: tables[number]  # type: ignore[method-assign]
    draw = partial(torch.empty, device=META, dtype=torch.bfloat16)
    widths = kind.widths(module.config)
    return denoiser, exact_row(denoiser, size.side, size.text_tokens, widths, lambda *shape: draw(shape))


def masked(step: Step) -> Row:
    denoiser, row = step
    entry = torch.empty(denoiser.page_layout("int8").entry_bytes(SIDE**2), dtype=torch.uint8, device=META)
    active = torch.empty(ACTIVE, dtype=torch.int64, device=META)
    return replace(row, active=active, pages=pages_between(denoiser, row, entry, entry))


@pytest.mark.parametrize(("number", "is_masked", "budget"), [(1, True, 520), (8, True, 620), (1, False, 520)])
@torch.inference_mode()
def test_a_flux_step_stays_within_its_budget(
    module: Any, kernels: ModuleType, number: int, is_masked: bool, budget: int
) -> None:
    counter = LaunchCounter()
    step = make_step(module, kernels, counter)
    rows = [masked(step) if is_masked else step[1]] * number
    step[0].forward(rows)  # index tables, which are kept for all steps
    counter.counts.clear()
    with counter:
        step[0].forward(rows)
    assert counter.total <= budget, counter.counts.most_common()
    assert counter.counts["triton.attention_inputs"] == (57 if is_masked else 19)


@pytest.mark.parametrize(
    ("name", "is_masked", "budget"),
    [
        ("FLUX.2-klein-4B", True, 225),
        ("FLUX.2-klein-4B", False, 225),
        ("Z-Image", True, 310),
        ("Z-Image", False, 310),
    ],
)
@torch.inference_mode()
def test_a_step_of_other_families_stays_within_its_budget(
    kernels: ModuleType, name: str, is_masked: bool, budget: int
) -> None:
    counter = LaunchCounter()
    step = make_family_step(name, kernels, counter)
    rows = [masked(step) if is_masked else step[1]]
    step[0].forward(rows)
    counter.counts.clear()
    with counter:
        step[0].forward(rows)
    assert counter.total <= budget, counter.counts.most_common()


@torch.inference_mode()
def test_requests_with_alike_masks_share_calls_of_attention(module: Any, kernels: ModuleType) -> None:
    """Wherever in the batch they are."""
    counter = LaunchCounter()
    step = make_step(module, kernels, counter)
    numbers = [205, 819, 210, 800]
    rows = [replace(masked(step), active=torch.empty(number, dtype=torch.int64, device=META)) for number in numbers]
    with counter:
        step[0].forward(rows)
    assert counter.counts["scaled_dot_product_attention"] == 2 * 57


@torch.inference_mode()
def test_masks_of_other_sizes_compile_no_kernel(module: Any, kernels: ModuleType) -> None:
    """Alone, nor in a batch of another number of requests."""
    counter = LaunchCounter()
    step = make_step(module, kernels, counter)

    def variants(*numbers: int) -> set[Hashable]:
        counter.variants = set()
        rows = [replace(masked(step), active=torch.empty(n, dtype=torch.int64, device=META)) for n in numbers]
        step[0].forward(rows)
        return counter.variants

    assert variants(410) == variants(37)
    assert variants(410, 333) == variants(16, 900, 31)


@pytest.mark.parametrize("name", ["FLUX.1-dev", *KINDS])
@torch.inference_mode()
def test_a_step_whose_pages_have_a_table_uploads_nothing(
    module: Any, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """So it can be captured as a CUDA graph, once there was one of the same shape."""
    counter = LaunchCounter()
    step = make_family_step(name, kernels, counter) if name in KINDS else make_step(module, kernels, counter)
    row = masked(step)
    assert row.pages is not None
    table = PageTable(torch.empty(2, dtype=torch.int64, device=META), torch.empty(2, device=META))
    row = replace(row, pages=replace(row.pages, table=table))
    step[0].forward([row])
    for module_of_upload in (gpu_tables, gpu_pages):
        monkeypatch.setattr(module_of_upload, "upload", None)
    held = list[Tensor]()
    with holding(held):
        step[0].forward([row])
    assert held


@torch.inference_mode()
def test_the_modulation_of_many_steps_is_kept(module: Any, kernels: ModuleType) -> None:
    """On a GPU: a launch for each block and norm less in every step."""
    denoiser, row = make_step(module, kernels, LaunchCounter())
    table = denoiser.modulation(ModulationInputs(row.pooled_prompt_embeds, 3.5, torch.empty(50, device=META), 2))
    assert table is not None
    assert len(table) == 50
