"""Convolutions in the box of the active tokens: against diffusers' forward pass over whole maps, in which each layer's
output outside the box is replaced by the template's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from core.page_scheme import PageDtype
from core.patches import Patch
from model_executor.kernels.low_rank import LowRank
from model_executor.models.base import PrimeRow, Row
from model_executor.models.boxes import Box, Size, Window, around, grown, share
from model_executor.models.unet.unet import Unet
from model_executor.models.unet.unet_sources import GROWTH, WORTH
from model_executor.page_cache.pages import PageEntry, Pages
from model_executor.patches.adapters import Adapter
from tools.random_unet_checkpoints import sd_unet, sdxl_unet

WIDTH = 24
GRID = (7, 6)
MASKS = {
    "middle": [15, 16, 21, 22],
    "upper left corner": [0, 1, 6],
    "lower right corner": [35, 40, 41],
    "left border": [12, 18],
    "bottom border": [38, 39],
    "two spots": [8, 22],
}


def deep_unet(in_channels: int, width: int) -> Any:
    """As Stable Diffusion 1: its deepest map has fewer pixels than there are tokens."""
    return UNet2DConditionModel(
        in_channels=in_channels,
        out_channels=4,
        block_out_channels=(16, 32, 32, 32),
        down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        layers_per_block=1,
        cross_attention_dim=width,
        attention_head_dim=4,
        norm_num_groups=4,
    )


MAKE: dict[str, Callable[..., Any]] = {"sd": sd_unet, "sdxl": sdxl_unet, "deep": deep_unet}


@pytest.fixture(scope="module", params=MAKE)
def unet(request: pytest.FixtureRequest) -> Unet:
    return make_unet(request.param)


def make_unet(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Unet:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Unet(MAKE[name](9, WIDTH, **options).to(dtype).eval().requires_grad_(False), 1000, 32)


def make_row(unet: Unet, seed: int, grid: Size = GRID) -> Row:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    config: Any = unet.module.config
    tokens = grid[0] * grid[1]
    return Row(
        latents=draw(tokens, 64),
        condition=draw(tokens, 80),
        prompt_embeds=draw(7, config.cross_attention_dim),
        pooled_prompt_embeds=draw(WIDTH if config.addition_embed_type else 0),
        sigma=torch.tensor(0.5),
        guidance_scale=1.0,
        grid=grid,
    )


def make_edit(unet: Unet, template: Row, active: Tensor, dtype: PageDtype = "float32") -> Row:
    """The edit's row: with another prompt, and other content under the mask."""
    other = make_row(unet, 1, template.grid)
    latents = template.latents.index_copy(0, active, other.latents[active])
    pages = Pages(unet.page_layout(dtype), len(latents), primed(unet, template, dtype), None, 0.0)
    return replace(template, latents=latents, prompt_embeds=other.prompt_embeds, active=active, pages=pages)


def primed(unet: Unet, row: Row, dtype: PageDtype = "float32") -> Tensor:
    layout = unet.page_layout(dtype)
    entry = torch.full([layout.entry_bytes(len(row.latents))], 0x7F, dtype=torch.uint8)
    template = PrimeRow(
        latents=row.latents,
        condition=row.condition,
        prompt_embeds=row.prompt_embeds,
        pooled_prompt_embeds=row.pooled_prompt_embeds,
        sigma=row.sigma,
        guidance_scale=row.guidance_scale,
        grid=row.grid,
        patches=row.patches,
        hidden=None,
        entry=entry,
    )
    assert unet.prime([template], (0, layout.num_blocks)) == [()]
    return entry


# ---------------------------------------------------------------------------------------------------------- reference

KEPT = (ResnetBlock2D, Upsample2D, BasicTransformerBlock)


@dataclass
class Reference:
    """diffusers' forward pass with hooks: a pass over the template records the layers' outputs, and a pass over an edit
    restores them where the edit computes nothing.
    """

    unet: Unet
    template: Row
    outputs: list[Tensor] = field(default_factory=list)
    inner: list[Tensor] = field(default_factory=list)
    """What each residual block's second norm sees."""

    def __post_init__(self) -> None:
        with self._hooks(self._note, self._note_inner):
            self.unet.forward([self.template])

    def __call__(self, edit: Row, full: Collection[int] = ()) -> Tensor:
        """The prediction for the active tokens. full: indices of blocks that are computed completely, in execution
        order.
        """
        assert edit.active is not None
        box = grown(around(edit.active, edit.grid[1]), GROWTH, edit.grid)
        kept, inner = iter(enumerate(self.outputs)), iter(self.inner)
        in_full = iter([n in full for n, kind in enumerate(self._kinds()) if kind is ResnetBlock2D])

        def put_back(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            number, before = next(kept)
            if number in full or self._side(output) == 0:
                return output
            if output.ndim == 3:
                return before.index_copy(1, self._tokens(edit, output), output[:, self._tokens(edit, output)])
            return boxed(output, before)

        def boxed(x: Tensor, before: Tensor) -> Tensor:
            left, top, right, bottom = (self._side(x) * edge for edge in box)
            whole = before.clone()
            whole[:, :, top:bottom, left:right] = x[:, :, top:bottom, left:right]
            return whole

        def normalise(norm: Any, args: Any, output: Tensor) -> Tensor:
            x, before = args[0], next(inner)
            if next(in_full) or self._side(x) == 0:
                return output
            mean, variance = moments_of(boxed(x, before), norm.num_groups)
            x = (x.unflatten(1, (norm.num_groups, -1)) - mean) / (variance + norm.eps).sqrt()
            return x.flatten(1, 2) * norm.weight[:, None, None] + norm.bias[:, None, None]

        with self._hooks(put_back, normalise):
            (whole,) = self.unet.forward([replace(edit, active=None, pages=None)])
        return whole[edit.active]

    def _note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.outputs.append(output.clone())

    def _note_inner(self, norm: Any, args: Any, output: Tensor) -> None:
        self.inner.append(args[0].clone())

    @contextmanager
    def _hooks(self, of_layer: Callable[..., Any], of_norm: Callable[..., Any]) -> Iterator[None]:
        used = self.unet.patches.under(self.template.patches).module
        layers = [module for module in used.modules() if isinstance(module, KEPT)]
        hooks = [layer.register_forward_hook(of_layer) for layer in layers]
        hooks += [each.norm2.register_forward_hook(of_norm) for each in layers if isinstance(each, ResnetBlock2D)]
        yield
        for hook in hooks:
            hook.remove()

    def _kinds(self) -> list[type]:
        """The kinds of the layers, in execution order."""
        kinds: list[type] = []
        with self._hooks(lambda module, args, output: kinds.append(type(module)), lambda norm, args, output: None):
            self.unet.forward([self.template])
        return kinds

    def _side(self, output: Tensor) -> int:
        """Pixels per token; 0 if there are fewer pixels than tokens."""
        rows, columns = self.template.grid
        if output.ndim == 4:
            return output.shape[2] // rows
        return int((output.shape[1] / (rows * columns)) ** 0.5)

    def _tokens(self, edit: Row, output: Tensor) -> Tensor:
        """The values of a map's active tokens."""
        side, (rows, columns) = self._side(output), edit.grid
        mask = torch.zeros(rows * columns).index_fill(0, edit.active, 1.0).view(1, 1, rows, columns)  # type: ignore[arg-type]
        return F.interpolate(mask, scale_factor=float(side)).flatten().nonzero()[:, 0]


def moments_of(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of each group."""
    groups = x.unflatten(1, (num_groups, -1))
    return groups.mean((2, 3, 4), True), groups.var((2, 3, 4), correction=0, keepdim=True)


def first_pages(unet: Unet, num_tokens: int) -> list[int]:
    """The first page of each block that is cached."""
    sizes = [run.pages for run in unet.block_runs(num_tokens) for _ in range(run.number)]
    return [0, *accumulate(sizes)][:-1]


def assert_close(ours: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.1
    assert (ours - expected).abs().max() < 1e-4 * expected.std()


# -------------------------------------------------------------------------------------------------------------- steps


@torch.inference_mode()
@pytest.mark.parametrize("mask", MASKS)
def test_a_box_equals_that_part_of_a_whole_map(unet: Unet, mask: str) -> None:
    template = make_row(unet, 0)
    edit = make_edit(unet, template, torch.tensor(MASKS[mask]))
    (ours,) = unet.forward([edit])
    assert_close(ours, Reference(unet, template)(edit))
    (exact,) = unet.forward([replace(edit, active=None)])
    assert (ours - exact[edit.active]).abs().max() > 1e-3 * exact.std()  # it is the template's that lies around


@torch.inference_mode()
@pytest.mark.parametrize("grid", [(5, 9), (9, 5), (4, 4), (8, 8)])
def test_grids_of_any_sides(unet: Unet, grid: Size) -> None:
    """Odd ones too, whose deeper maps have an extra half row or column."""
    template = make_row(unet, 0, grid)
    for token in (0, grid[1] - 1, grid[0] * grid[1] // 2, grid[0] * grid[1] - 1):
        edit = make_edit(unet, template, torch.tensor([token]))
        assert_close(unet.forward([edit])[0], Reference(unet, template)(edit))


@torch.inference_mode()
@pytest.mark.parametrize("every", [2, 3])
def test_blocks_in_full_among_others(unet: Unet, every: int) -> None:
    template, active = make_row(unet, 0), torch.tensor(MASKS["middle"])
    edit, reference = make_edit(unet, template, active), Reference(unet, template)
    deep = [n for n, output in enumerate(reference.outputs) if reference._side(output) == 0]
    kept = [n for n in range(len(reference.outputs)) if n not in deep]
    full = kept[::every]
    pages = [first for number, first in zip(kept, first_pages(unet, len(edit.latents)), strict=True) if number in full]
    assert_close(unet.forward([replace(edit, full_blocks=pages)])[0], reference(edit, full))


@torch.inference_mode()
def test_two_rows_of_an_edit_share_the_box(unet: Unet) -> None:
    template = make_row(unet, 0)
    edit = make_edit(unet, template, torch.tensor(MASKS["upper left corner"]))
    guided = [edit, replace(edit, prompt_embeds=make_row(unet, 2).prompt_embeds)]
    reference = Reference(unet, template)
    unet._is_shared = True
    try:
        outputs = unet.forward(guided)
    finally:
        unet._is_shared = False
    for ours, row in zip(outputs, guided, strict=True):
        assert_close(ours, reference(row))


@torch.inference_mode()
def test_adapted_convolutions(unet: Unet) -> None:
    """In a residual block and in an up-sampler."""
    generator = torch.Generator().manual_seed(5)
    modules = dict(unet.module.named_modules())
    wanted = ("down_blocks.0.resnets.0.conv1", "down_blocks.0.resnets.0.conv2", "up_blocks.1.upsamplers.0.conv")
    wanted += ("up_blocks.1.resnets.0.conv_shortcut", "up_blocks.1.resnets.0.time_emb_proj")
    layers = {}
    for name in wanted:
        layer: Any = modules[name]
        down, up = numbers_of(layer)
        layers[name] = LowRank(torch.randn(2, down, generator=generator), torch.randn(up, 2, generator=generator))
    template, active = make_row(unet, 0), torch.tensor(MASKS["middle"])
    (plain,) = unet.forward([make_edit(unet, template, active)])
    unet.patches.put("red", unet.patches.prepare(Adapter("red", Path("red.safetensors"), "red", {}), layers))
    template = replace(template, patches=(Patch("red", 0.8),))
    edit = make_edit(unet, template, active)
    (ours,) = unet.forward([edit])
    assert_close(ours, Reference(unet, template)(edit))
    unet.patches.drop("red")
    assert (ours - plain).abs().max() > 0.1 * plain.std()


def numbers_of(layer: Any) -> tuple[int, int]:
    """The number of values that are read for each row or pixel, and written."""
    if hasattr(layer, "in_features"):
        return layer.in_features, layer.out_features
    return layer.in_channels * layer.kernel_size[0] * layer.kernel_size[1], layer.out_channels


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("int8", 0.05)])
@pytest.mark.parametrize("mask", ["middle", "lower right corner"])
def test_a_box_of_an_unchanged_template_equals_the_whole(
    unet: Unet, mask: str, dtype: PageDtype, tolerance: float
) -> None:
    template, active = make_row(unet, 0), torch.tensor(MASKS[mask])
    edit = make_edit(unet, template, active, dtype)
    own = replace(edit, latents=template.latents, prompt_embeds=template.prompt_embeds)
    (whole,), (some,) = unet.forward([template]), unet.forward([own])
    assert (some - whole[active]).abs().max() < tolerance * whole.std()


@torch.inference_mode()
@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_a_box_in_bfloat16(name: str) -> None:
    unet = make_unet(name, torch.bfloat16)
    single = make_row(unet, 0)
    template = replace(
        single,
        latents=single.latents.bfloat16(),
        condition=single.condition.bfloat16(),
        prompt_embeds=single.prompt_embeds.bfloat16(),
        pooled_prompt_embeds=single.pooled_prompt_embeds.bfloat16(),
    )
    active = torch.tensor(MASKS["left border"])
    pages = Pages(unet.page_layout("bfloat16"), len(template.latents), primed(unet, template, "bfloat16"), None, 0.0)
    (whole,), (some,) = unet.forward([template]), unet.forward([replace(template, active=active, pages=pages)])
    assert some.dtype == torch.bfloat16
    assert (some - whole[active]).abs().max() < 0.1 * whole.std()


@torch.inference_mode()
def test_residual_blocks_with_time_dependent_scales_are_computed_whole() -> None:
    """Up-samplers are not."""
    unet = make_unet("sd", resnet_time_scale_shift="scale_shift")
    template = make_row(unet, 0)
    edit, reference = make_edit(unet, template, torch.tensor(MASKS["middle"])), Reference(unet, template)
    resnets = [number for number, kind in enumerate(reference._kinds()) if kind is ResnetBlock2D]
    assert_close(unet.forward([edit])[0], reference(edit, resnets))


@torch.inference_mode()
@pytest.mark.parametrize("active", [[0, 41], [0, 5, 36], list(range(3, 40))])
def test_if_the_box_is_most_of_the_picture_convolutions_are_computed_whole(unet: Unet, active: list[int]) -> None:
    """Then pages of residual blocks and up-samplers are not read, and only transformers omit tokens."""
    template, tokens = make_row(unet, 0), torch.tensor(active)
    assert share(grown(around(tokens, GRID[1]), GROWTH, GRID), GRID) > WORTH
    edit, reference = make_edit(unet, template, tokens), Reference(unet, template)
    convolutions = [n for n, output in enumerate(reference.outputs) if output.ndim == 4]
    assert_close(unet.forward([edit])[0], reference(edit, convolutions))


@torch.inference_mode()
def test_a_box_of_the_whole_picture_would_be_right(unet: Unet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it saves nothing."""
    template = make_row(unet, 0)
    edit = make_edit(unet, template, torch.tensor([0, 41]))
    (whole,) = unet.forward([edit])
    monkeypatch.setattr("model_executor.models.unet.unet_sources.WORTH", 1.0)
    assert_close(unet.forward([edit])[0], whole)


@torch.inference_mode()
def test_a_box_at_hand_is_the_one_that_is_found(unet: Unet) -> None:
    edit = make_edit(unet, make_row(unet, 0), torch.tensor(MASKS["two spots"]))
    (found,), (given,) = unet.forward([edit]), unet.forward([replace(edit, box=(2, 1, 5, 4))])
    assert torch.equal(found, given)
    (other,) = unet.forward([replace(edit, box=(1, 1, 5, 4))])
    assert not torch.equal(found, other)


# -------------------------------------------------------------------------------------------------------------- pages


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "tolerance"), [("int8", 1e-3), ("bfloat16", 1e-3), ("float32", 1e-5)])
def test_moments_of_each_token_are_kept_beside_pages_of_any_dtype(
    unet: Unet, dtype: PageDtype, tolerance: float
) -> None:
    template = make_row(unet, 0)
    entry, reference = primed(unet, template, dtype), Reference(unet, template)
    kept = PageEntry(entry, unet.page_layout(dtype), len(template.latents)).moments
    expected = [token_moments(x, reference._side(x)) for x in reference.inner if reference._side(x)]
    written = kept[kept.flatten(1).any(1)]  # the first page of each residual block
    torch.testing.assert_close(written.float(), torch.stack(expected), rtol=tolerance, atol=tolerance)


def token_moments(x: Tensor, side: int) -> Tensor:
    """Means and standard deviations of 4 groups for each token, [8, tokens]."""
    rows, columns = x.shape[2] // side, x.shape[3] // side
    cells = [x[..., side * i : side * (i + 1), side * j : side * (j + 1)] for i in range(rows) for j in range(columns)]
    each = [(mean.flatten(), variance.sqrt().flatten()) for mean, variance in (moments_of(cell, 4) for cell in cells)]
    return torch.stack([torch.cat(pair) for pair in each], dim=1)


@torch.inference_mode()
def test_moments_between_keyframes_are_interpolated(unet: Unet) -> None:
    entries = [primed(unet, replace(make_row(unet, 0), sigma=torch.tensor(sigma))) for sigma in (0.6, 0.4)]
    layout, tokens = unet.page_layout("float32"), GRID[0] * GRID[1]
    near, far = (PageEntry(entry, layout, tokens).moments[0] for entry in entries)
    assert not torch.equal(near, far)
    for weight in (0.0, 0.25, 1.0):
        read = Pages(layout, tokens, *entries, weight).open().moments(0)
        torch.testing.assert_close(read, (1 - weight) * near + weight * far)
    assert torch.equal(Pages(layout, tokens, entries[0], None, 0.0).open().moments(0), near)


def test_moments_of_a_loading_page_are_waited_for() -> None:
    unet, asked = make_unet("sd"), list[int]()
    entry = torch.zeros(unet.page_layout("int8").entry_bytes(4), dtype=torch.uint8)
    Pages(unet.page_layout("int8"), 4, entry, None, 0.0, asked.append).open().moments(3)
    assert asked == [3]


# -------------------------------------------------------------------------------------------------------------- boxes

SIZE = (6, 8)


@pytest.mark.parametrize("box", [(2, 2, 5, 4), (0, 0, 3, 2), (5, 3, 8, 6), (0, 0, 8, 6), (7, 5, 8, 6)])
@pytest.mark.parametrize("by", [1, 2])
def test_a_window_sees_what_lies_around_it_and_zeros_beyond_the_map(box: Box, by: int) -> None:
    left, top, right, bottom = box
    window = Window.on(box, SIZE, torch.device("cpu"))
    x = torch.randn(2, 3, *SIZE)
    padded = F.pad(x, [by] * 4)
    around_it = padded[:, :, top : bottom + 2 * by, left : right + 2 * by]
    assert torch.equal(window.cut(x), x[:, :, top:bottom, left:right])
    assert torch.equal(window.cut_grown(x, by), around_it)
    assert window.share == pytest.approx((right - left) * (bottom - top) / 48)
    assert torch.equal(window.edge, F.pad(torch.ones(SIZE), [1] * 4)[top : bottom + 2, left : right + 2].bool())


@pytest.mark.parametrize("size", [(6, 8), (5, 7)])
@pytest.mark.parametrize("box", [(2, 2, 5, 4), (0, 0, 3, 2), (5, 3, 7, 5), (0, 0, 7, 5), (3, 1, 4, 2)])
def test_a_window_of_an_enlarged_map(box: Box, size: Size) -> None:
    """The larger map may have an odd number of rows and columns."""
    left, top, right, bottom = box
    small = torch.randn(1, 2, -(-size[0] // 2), -(-size[1] // 2))
    padded = F.pad(F.interpolate(small, size=size, mode="nearest"), [1] * 4)
    window = Window.on(box, size, torch.device("cpu"))
    assert torch.equal(window.cut_grown_twice_as_large(small, 1), padded[:, :, top : bottom + 2, left : right + 2])


def test_a_moment_beyond_float16_stays_a_number() -> None:
    """With weight zero, as for a token in the box, infinity would become NaN."""
    unet = make_unet("sd")
    layout = unet.page_layout("int8")
    entry = PageEntry(torch.zeros(layout.entry_bytes(4), dtype=torch.uint8), layout, 4)
    moments = torch.full((layout.num_moments, 4), 1e6)
    entry.write(0, torch.zeros(2, layout.num_heads, 4, layout.head_dim), moments)
    assert torch.isfinite(entry.moments[0]).all()
