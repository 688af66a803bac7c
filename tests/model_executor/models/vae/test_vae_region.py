"""Decoding a whole picture against diffusers' VAE, and decoding a region against the whole picture."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

from core.config import EMBEDDED_MODEL, ModelConfig
from core.errors import NonFiniteError
from entrypoints.calibration.similarity import ssim
from model_executor.models.base import Family
from model_executor.models.boxes import times
from model_executor.models.families.vae_family import to_pixels
from model_executor.models.vae.vae_region import CELLS_PER_TOKEN, WORTH, RegionDecoder, VaeRegion
from model_executor.worker.loading.resident import ResidentModels

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "examples" / "person.png"
GRID = (16, 16)


def make_vae(**changes: object) -> AutoencoderKL:
    """A VAE with random weights, like FLUX.1's with attention, three layers per up block and groups of several
    channels.
    """
    settings: dict[str, object] = {
        "block_out_channels": (8, 16, 32, 32),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
        "latent_channels": 16,
        "norm_num_groups": 4,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoencoderKL(**{**settings, **changes}).eval()  # type: ignore[arg-type]


def family(path: str) -> Family:
    models = ResidentModels.open([ModelConfig(model=path, served_model_name="m", dtype="float32")])
    models.load_all()
    return models.families["m"]


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> Family:
    return family(str(tiny_checkpoint))


@pytest.fixture(scope="module")
def embedded() -> Family:
    return family(EMBEDDED_MODEL)


def noise(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(1, 16, rows, columns, generator=torch.Generator().manual_seed(seed))


def tokens(box: tuple[int, int, int, int], columns: int) -> Tensor:
    left, top, right, bottom = box
    return torch.tensor([y * columns + x for y in range(top, bottom) for x in range(left, right)])


# ------------------------------------------------------------------------------------------------------- the whole


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mid_block_add_attention": False, "layers_per_block": 1},
        {"use_post_quant_conv": True},
        {
            "block_out_channels": (8, 16),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
    ],
)
@pytest.mark.parametrize("size", [(4, 4), (10, 6)])
@torch.inference_mode()
def test_whole_equals_diffusers(changes: dict[str, object], size: tuple[int, int]) -> None:
    vae = make_vae(**changes)
    latents = noise(*size)
    torch.testing.assert_close(RegionDecoder(vae).decode(latents), vae.decode(latents).sample, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_whole_in_bfloat16_is_as_close_as_diffusers_is() -> None:
    """Compared with the float32 picture of the same weights."""
    vae = make_vae().to(torch.bfloat16)
    latents = noise(8, 8).to(torch.bfloat16)
    ours, theirs = RegionDecoder(vae).decode(latents), vae.decode(latents).sample
    exact = vae.float().decode(latents.float()).sample
    assert (ours - exact).abs().mean() <= 1.1 * (theirs - exact).abs().mean()


COUNT_FAULTS = """
import resource
import torch
from core.config import EMBEDDED_MODEL, ModelConfig
from core.errors import NonFiniteError
from core.ipc.heap import keep_freed_memory
from model_executor.worker.loading.resident import KEPT_BYTES, ResidentModels

torch.set_num_threads(1)
models = ResidentModels.open([ModelConfig(model=EMBEDDED_MODEL, served_model_name="m", dtype="float32")])
models.load(models.keys["m"]["vae"])

def decode():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    models.families["m"].decode(torch.zeros(256, 64), 256, 256)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with torch.inference_mode():
    keep_freed_memory(KEPT_BYTES)
    faults = [decode() for _ in range(6)]
print(min(faults))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_a_warm_decoder_asks_the_system_for_no_memory() -> None:
    """Counts page faults in a process of its own, since this one's heap depends on earlier tests."""
    command = [sys.executable, "-c", COUNT_FAULTS]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 1000, "the least of some calls, since the heap takes two or three to grow"


# ------------------------------------------------------------------------------------------------------ the region


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, int, int, int], tuple[int, int]]:
    rows, columns = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    left, top = draw(st.integers(0, columns - 1)), draw(st.integers(0, rows - 1))
    return (left, top, draw(st.integers(left + 1, columns)), draw(st.integers(top + 1, rows))), (rows, columns)


@given(boxes(), st.integers(0, 5))
def test_cut_and_trim_select_the_same_pixels(
    boxed: tuple[tuple[int, int, int, int], tuple[int, int]], halo: int
) -> None:
    """With a map of its own coordinates, enlarged as in the last two up blocks."""
    box, grid = boxed
    region = VaeRegion.around(box, grid, halo)
    if not region.outside.any():
        return
    rows, columns = (CELLS_PER_TOKEN * side for side in grid)
    whole = torch.arange(rows * columns, dtype=torch.float32).view(1, 1, rows, columns)
    crop, _ = region.cut(whole, 1).parts
    left, top, right, bottom = times(box, 16)
    expected = nn.functional.interpolate(whole, scale_factor=4.0)[:, :, top:bottom, left:right]
    assert torch.equal(region.trim(nn.functional.interpolate(crop, scale_factor=4.0)), expected)


@given(boxes(), st.integers(0, 5))
def test_a_crop_has_a_halo_and_its_shape_depends_on_the_box_alone(
    boxed: tuple[tuple[int, int, int, int], tuple[int, int]], halo: int
) -> None:
    box, grid = boxed
    region = VaeRegion.around(box, grid, halo)
    for axis, size in ((0, CELLS_PER_TOKEN * grid[1]), (1, CELLS_PER_TOKEN * grid[0])):
        (start, stop), (first, last) = region.inside[axis::2], region.crop[axis::2]
        assert max(start - halo, 0) >= first >= 0
        assert min(stop + halo, size) <= last <= size
        assert last - first == min(stop - start + 2 * halo, size)


@given(boxes())
def test_a_regions_predicted_cost_is_right(boxed: tuple[tuple[int, int, int, int], tuple[int, int]]) -> None:
    box, grid = boxed
    region = VaeRegion.around(box, grid, 2)
    if not region.outside.any():
        return
    whole = torch.zeros(1, 1, CELLS_PER_TOKEN * grid[0], CELLS_PER_TOKEN * grid[1])
    assert sum(part.numel() for part in region.cut(whole, 1).parts) / whole.numel() == pytest.approx(region.work)


@given(boxes())
def test_moments_weigh_every_cell_once(boxed: tuple[tuple[int, int, int, int], tuple[int, int]]) -> None:
    """A map of one value inside the crop and another outside has exactly known moments."""
    box, grid = boxed
    region = VaeRegion.around(box, grid, 2)
    if not region.outside.any():
        return
    whole = torch.full((1, 4, CELLS_PER_TOKEN * grid[0], CELLS_PER_TOKEN * grid[1]), 3.0)
    left, top, right, bottom = region.crop
    whole[:, :, top:bottom, left:right] = -1.0
    maps = region.cut(whole, 2)
    assert maps.estimate is not None
    expected = torch.stack([whole.mean(), whole.square().mean()])[:, None].expand(2, 2)
    torch.testing.assert_close(maps.estimate.moments(*maps.parts, 2), expected, rtol=1e-3, atol=1e-3)


def test_weights_correct_the_bias_of_the_mosaic() -> None:
    """For maps with a gradient, the weighted mean is closer than the plain mean of the mosaic."""
    generator = torch.Generator().manual_seed(0)
    region = VaeRegion.around((1, 1, 5, 4), GRID, 2)
    slope = torch.linspace(-1, 1, 64)
    worse = []
    for _ in range(20):
        a, b = torch.randn(2, 4, 1, 1, generator=generator)
        whole = (a * slope + b * slope[:, None] + 0.1 * torch.randn(4, 64, 64, generator=generator))[None]
        maps = region.cut(whole, 4)
        assert maps.estimate is not None
        plain = replace(maps.estimate, weights=region.outside / region.outside.sum())
        exact = whole.mean((0, 2, 3))
        errors = [(e.moments(*maps.parts, 4)[0] - exact).abs().sum() for e in (maps.estimate, plain)]
        worse.append(errors[0] > 0.5 * errors[1])
    assert sum(worse) <= 2


@torch.inference_mode()
def edited_example(embedded: Family, box: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(template, its latents with those of the upside-down picture inside the box, active tokens)."""
    template = torch.from_numpy(np.asarray(Image.open(EXAMPLE).convert("RGB").resize((256, 256))).copy())
    active = tokens(box, GRID[1])
    latents = embedded.encode_template(template)
    latents[active] = embedded.encode_template(template.flip(0))[active]
    return template, latents, active


@pytest.mark.parametrize("box", [(6, 5, 9, 9), (0, 0, 4, 4), (12, 2, 16, 14), (4, 4, 11, 10)])
@pytest.mark.usefixtures("slow_bfloat16")
@torch.inference_mode()
def test_region_is_close_to_the_whole(embedded: Family, box: tuple[int, int, int, int]) -> None:
    _, latents, active = edited_example(embedded, box)
    pixels, (left, top, right, bottom) = embedded.decode_region(latents, active, 256, 256)
    assert (left, top, right, bottom) == times(box, 16)
    whole = embedded.decode(latents, 256, 256)[top:bottom, left:right]
    difference = (pixels.int() - whole.int()).abs()
    assert 0 < difference.float().mean() < 3  # not 0: else this would not be the region's own path
    assert difference.max() <= 16
    assert ssim(pixels.numpy(), whole.numpy()) > 0.993


@torch.inference_mode()
def test_bfloat16_adds_no_more_to_a_region_than_to_the_whole() -> None:
    """Both compared with the float32 picture of the same weights, for latents like a picture's."""
    vae = make_vae(layers_per_block=1, mid_block_add_attention=False)
    latents, decoder = nn.functional.interpolate(noise(4, 4), size=32, mode="bilinear"), RegionDecoder(vae)
    region = decoder.region((4, 4, 8, 8), GRID)
    assert region is not None
    exact, exact_region = decoder.decode(latents)[:, :, 64:128, 64:128], decoder.decode_region(latents, region)
    small, rounded = RegionDecoder(vae.to(torch.bfloat16)), latents.to(torch.bfloat16)
    error = (small.decode(rounded)[:, :, 64:128, 64:128] - exact).abs().mean()
    region_error = (small.decode_region(rounded, region) - exact_region).abs().mean()
    assert region_error <= 1.5 * error


@torch.inference_mode()
def test_region_comes_from_its_own_request_alone(embedded: Family) -> None:
    _, latents, active = edited_example(embedded, (6, 5, 9, 9))
    first, _ = embedded.decode_region(latents, active, 256, 256)
    for box in ((0, 0, 4, 4), (4, 4, 11, 10), (0, 0, 16, 16)):
        other = edited_example(embedded, box)
        embedded.decode_region(other[1], other[2], 256, 256)
    embedded.decode(latents, 256, 256)
    again, _ = embedded.decode_region(latents.clone(), active, 256, 256)
    assert torch.equal(first, again)


@pytest.mark.parametrize("box", [(0, 0, 16, 16), (1, 0, 16, 16), (2, 2, 15, 14)])
@pytest.mark.usefixtures("slow_bfloat16")
@torch.inference_mode()
def test_where_a_crop_saves_nothing_the_whole_is_decoded(embedded: Family, box: tuple[int, int, int, int]) -> None:
    _, latents, active = edited_example(embedded, box)
    pixels, (left, top, right, bottom) = embedded.decode_region(latents, active, 256, 256)
    assert torch.equal(pixels, embedded.decode(latents, 256, 256)[top:bottom, left:right])


@pytest.mark.parametrize("size", [(16, 16), (16, 160), (96, 64), (208, 176)])
@torch.inference_mode()
def test_every_size_and_corner_has_its_box(tiny: Family, size: tuple[int, int]) -> None:
    width, height = size
    rows, columns = tiny.grid(width, height)
    latents = torch.randn(rows * columns, 64, generator=torch.Generator().manual_seed(1))
    whole = tiny.decode(latents, width, height).int()
    for token in (0, columns - 1, rows * columns - 1):
        pixels, (left, top, right, bottom) = tiny.decode_region(latents, torch.tensor([token]), width, height)
        assert (left, top) == (token % columns * 16, token // columns * 16)
        assert pixels.shape == (bottom - top, right - left, 3) == (16, 16, 3)
        assert (pixels.int() - whole[top:bottom, left:right]).abs().float().mean() < 12


@torch.inference_mode()
def test_two_resolutions_are_too_few_to_crop() -> None:
    two = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    decoder = RegionDecoder(make_vae(block_out_channels=(8, 16), **two))
    assert decoder.region((0, 0, 1, 1), (64, 64)) is None


def test_a_region_is_taken_only_where_it_saves_work() -> None:
    decoder = RegionDecoder(make_vae())
    regions = [decoder.region((0, 0, side, side), GRID) for side in range(1, 17)]
    assert [region is None for region in regions] == sorted(region is None for region in regions)
    assert regions[3] is not None
    assert max(region.work for region in regions if region) <= WORTH


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_no_picture_are_an_error(value: float) -> None:
    picture = torch.zeros(1, 3, 8, 8)
    to_pixels(picture)
    picture[0, 1, 2, 3] = value
    with pytest.raises(NonFiniteError):
        to_pixels(picture)
    picture[0, 2, 3, 1] = -value
    with pytest.raises(NonFiniteError):
        to_pixels(picture)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_numbers_are_a_picture_however_large_their_sum(dtype: torch.dtype) -> None:
    pixels = to_pixels(torch.full((1, 3, 8, 8), torch.finfo(dtype).max, dtype=dtype))
    assert pixels.eq(255).all()
