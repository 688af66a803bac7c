"""Fused UNets against the same layers as diffusers has them, in float32: on a CPU with interpreted kernels; and on the
meta device, where launches are counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from launches import META, LaunchCounter
from torch import Tensor

from benchmarks.gpu.boxes import middle_box
from benchmarks.micro.rows import pages_between
from benchmarks.micro.rows import unet_row as row_of_benchmarks
from benchmarks.micro.unet_step import CONFIGS, LAYERS, TEXT_TOKENS, TOKEN
from core.page_scheme import PageDtype
from core.patches import Patch
from model_executor.kernels.gpu_operators import GpuOperators, TritonOperators
from model_executor.kernels.linear import plain_linear
from model_executor.kernels.low_rank import LowRank
from model_executor.kernels.operators import Operators
from model_executor.kernels.unet_operators import UnetOperators
from model_executor.models.base import PrimeRow, Row
from model_executor.models.boxes import Box
from model_executor.models.unet.unet import Unet
from model_executor.models.unet.unet_fused import FusedTransformerBlock, joined
from model_executor.page_cache.pages import Pages, PageTable
from model_executor.patches.adapters import Adapter

pytest.importorskip("triton")  # interpreted: see conftest.py

GRID, WIDTH = (3, 4), 24
TOKENS = GRID[0] * GRID[1]
CORNER = torch.tensor([1, 5, 5])  # as if padded with the last one
SPREAD = torch.tensor([0, 6, 11])  # their box is nearly everything, so that convolutions compute all

SMALL: Mapping[str, Any] = {
    **{"in_channels": 9, "out_channels": 4, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4},
    **{"attention_head_dim": 2, "cross_attention_dim": WIDTH},
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "sd": {},
    "sdxl": {
        **{"use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 8},
        **{"projection_class_embeddings_input_dim": WIDTH + 48, "transformer_layers_per_block": (1, 2)},
    },
}


class Pair:
    """A small UNet, fused and as it is."""

    def __init__(self, kind: str) -> None:
        from model_executor.kernels import triton_kernels

        self.fused, self.plain = (
            make_unet(kind, operators) for operators in (TritonOperators(triton_kernels), Operators(plain_linear))
        )
        self.fused._is_shared = self.plain._is_shared = True
        assert len(self.fused.patches.plain.layers._transformers) == {"sd": 4, "sdxl": 8}[kind]
        template = make_row(0)
        self.entries = {dtype: [self.entry(template, level, dtype) for level in (0.6, 0.4)] for dtype in DTYPES}

    def entry(self, row: Row, level: float, dtype: PageDtype) -> Tensor:
        layout = self.plain.page_layout(dtype)
        entry = torch.zeros(layout.entry_bytes(TOKENS), dtype=torch.uint8)
        self.plain.prime([template_of(row, level, entry)], (0, layout.num_blocks))
        return entry

    def edit(self, active: Tensor, dtype: PageDtype = "int8", weight: float = 0.3, **options: Any) -> list[Row]:
        """The two rows of a guided edit."""
        near, far = self.entries[dtype]
        pages = Pages(self.plain.page_layout(dtype), TOKENS, near, far, weight)
        first = replace(make_row(1), active=active, pages=pages, **options)
        return [first, replace(first, prompt_embeds=make_row(2).prompt_embeds)]

    def assert_alike(self, rows: Sequence[Row]) -> None:
        for ours, theirs in zip(self.fused.forward(rows), self.plain.forward(rows), strict=True):
            assert theirs.std() > 0.05
            assert (ours - theirs).abs().max() < 1e-4 * theirs.std()


DTYPES: Sequence[PageDtype] = ("int8", "float32")


def make_unet(kind: str, operators: Operators) -> Unet:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Unet(UNet2DConditionModel(**{**SMALL, **KINDS[kind]}).eval().requires_grad_(False), 1000, 32, operators)


def make_row(seed: int) -> Row:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Row(
        latents=draw(TOKENS, 64),
        condition=draw(TOKENS, 80),
        prompt_embeds=draw(5, WIDTH),
        pooled_prompt_embeds=draw(WIDTH),
        sigma=torch.tensor(0.5),
        guidance_scale=1.0,
        grid=GRID,
    )


def template_of(row: Row, level: float, entry: Tensor) -> PrimeRow:
    names = ("latents", "condition", "prompt_embeds", "pooled_prompt_embeds", "guidance_scale", "grid", "patches")
    common = {name: getattr(row, name) for name in names}
    return PrimeRow(**common, sigma=torch.tensor(level), hidden=None, entry=entry)


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Of Stable Diffusion XL's kind."""
    with torch.inference_mode():
        return Pair("sdxl")


# ---------------------------------------------------------------------------------------------------------- on a CPU


@torch.inference_mode()
def test_an_exact_step(pair: Pair) -> None:
    pair.assert_alike([make_row(1), make_row(2)])


@torch.inference_mode()
def test_a_masked_step(pair: Pair) -> None:
    """With keys and values of its prompts. Pages are waited for, and read where their table says, without those of
    weight 0."""
    rows, asked = pair.edit(CORNER, "float32", weight=0.0), list[int]()
    (near, far), layout = pair.entries["float32"], pair.plain.page_layout("float32")
    garbage = torch.full_like(far, 0xFF)
    table = PageTable(torch.tensor([garbage.data_ptr(), near.data_ptr()]), torch.tensor([0.0, 1.0]))
    pages = Pages(layout, TOKENS, garbage, far, 0.7, asked.append, table=table)
    known = [pair.fused.keys_values(row.prompt_embeds, ()) for row in rows]
    assert all(of_row is not None for of_row in known)
    assert pair.plain.keys_values(rows[0].prompt_embeds, ()) is None
    ours = [replace(row, pages=pages, prompt_state=of_row) for row, of_row in zip(rows, known, strict=True)]
    for one, other in zip(pair.fused.forward(ours), pair.plain.forward(rows), strict=True):
        assert (one - other).abs().max() < 1e-4 * other.std()
    assert set(asked) == set(range(layout.num_blocks))


@torch.inference_mode()
def test_blocks_in_full_and_convolutions_of_everything() -> None:
    pair = Pair("sd")
    pages = pair.plain.page_layout("int8").num_blocks
    pair.assert_alike(pair.edit(SPREAD, full_blocks=range(0, pages, 2))[:1])


@torch.inference_mode()
def test_adapted_layers_run_as_they_are(pair: Pair) -> None:
    """Also those that are joined with others: the twin's other layers stay views of the same memory."""
    generator = torch.Generator().manual_seed(5)
    block = "mid_block.attentions.0.transformer_blocks.0"
    sizes = {
        f"{block}.attn1.to_k": (16, 16),
        f"{block}.attn2.to_v": (WIDTH, 16),
        "mid_block.resnets.0.conv1": (144, 16),
    }
    sizes |= {"mid_block.resnets.0.time_emb_proj": (32, 16), "up_blocks.0.resnets.0.conv_shortcut": (32, 16)}
    layers = {
        name: LowRank(torch.randn(2, down, generator=generator), torch.randn(up, 2, generator=generator))
        for name, (down, up) in sizes.items()
    }
    for unet in (pair.fused, pair.plain):
        unet.patches.put("red", unet.patches.prepare(Adapter("red", Path("red.safetensors"), "red", {}), layers))
    rows = pair.edit(CORNER, patches=(Patch("red", 0.5),))[:1]
    pair.assert_alike([replace(rows[0], prompt_state=pair.fused.keys_values(rows[0].prompt_embeds, rows[0].patches))])
    ours, twins = (pair.fused.patches.under(patches).layers._transformers for patches in ((), rows[0].patches))
    assert shared_memory(ours[0]) == shared_memory(twins[0])


def shared_memory(block: FusedTransformerBlock) -> int:
    assert block._own is not None
    assert block._own.weight.data_ptr() == block._module.attn1.to_q.weight.data_ptr()
    return block._own.weight.data_ptr()


def test_layers_that_are_not_plain_are_not_joined() -> None:
    plain = torch.nn.Linear(4, 3, bias=False)
    assert joined([plain, torch.nn.Sequential(plain)]) is None
    both = joined([plain, other := torch.nn.Linear(4, 2)])
    assert both is not None
    x = torch.randn(5, 4)
    torch.testing.assert_close(both(x), torch.cat([plain(x), other(x)], dim=1))
    torch.testing.assert_close(both(x, 1), other(x))


# ---------------------------------------------------------------------------------------------------- without content


class UnetCounter(LaunchCounter):
    """As on a GPU, convolutions keep the memory format channels_last."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        is_convolution = func.overloadpacket.__name__ == "conv2d"
        return result.contiguous(memory_format=torch.channels_last) if is_convolution else result


class Counting(GpuOperators):
    """A GPU's operators whose UNet kernels are stubs."""

    def __init__(self, counter: LaunchCounter) -> None:
        super().__init__()
        self._counter = counter

    def of_unets(self, device: torch.device) -> UnetOperators:
        from model_executor.kernels import unet_kernels

        return UnetOperators(self._counter.kernels(unet_kernels))


@pytest.fixture(scope="module")
def sdxl() -> tuple[UnetCounter, Unet]:
    """Stable Diffusion XL's UNet without weights."""
    counter = UnetCounter()
    with META:
        module = UNet2DConditionModel(**LAYERS | CONFIGS["sdxl"]).eval().requires_grad_(False)
    return counter, Unet(module.to(torch.bfloat16), 1000, TOKEN, Counting(counter))


def guided(unet: Unet, side: int, box: Box | None) -> list[Row]:
    """The rows of a guided step, with side * side tokens. box: of the active ones; None for an exact step."""
    row = row_of_benchmarks(unet, side, TEXT_TOKENS, lambda *size: torch.empty(size, dtype=torch.bfloat16, device=META))
    if box is not None:
        entry = torch.empty(unet.page_layout("int8").entry_bytes(side * side), dtype=torch.uint8, device=META)
        left, top, right, bottom = box
        active = torch.empty((right - left) * (bottom - top), dtype=torch.int64, device=META)
        table = PageTable(torch.empty(2, dtype=torch.int64, device=META), torch.empty(2, device=META))
        pages = replace(pages_between(unet, row, entry, entry), table=table)
        row = replace(row, active=active, box=box, pages=pages)
    return [row, replace(row, prompt_embeds=row.prompt_embeds.clone())]


@pytest.mark.parametrize(("is_masked", "most"), [(True, 1245), (False, 1170)])
@torch.inference_mode()
def test_a_guided_step_launches_few_kernels(sdxl: tuple[UnetCounter, Unet], is_masked: bool, most: int) -> None:
    """And neither mixes devices nor waits. About 1,240 launches of a masked step, 1,165 of an exact one. Of the layers
    as diffusers has them they were 3,393 and 1,857."""
    (counter, unet), side = sdxl, 32
    rows = guided(unet, side, middle_box(0.2, side) if is_masked else None)
    counter.counts.clear()
    with counter:
        outputs = unet.forward(rows)
    assert [len(output) for output in outputs] == [
        side * side if row.active is None else len(row.active) for row in rows
    ]
    assert 1000 < counter.total <= most, counter.counts.most_common()


@torch.inference_mode()
def test_a_mask_of_another_size_compiles_no_kernel(sdxl: tuple[UnetCounter, Unet]) -> None:
    (counter, unet), found = sdxl, list[set[Hashable]]()
    for box in ((7, 3, 8, 4), middle_box(0.2, 32), (1, 2, 32, 20)):
        counter.variants = set()
        unet.forward(guided(unet, 32, box))
        found.append(counter.variants)
    assert len(found[0]) > 20
    assert all(variants == found[0] for variants in found)
