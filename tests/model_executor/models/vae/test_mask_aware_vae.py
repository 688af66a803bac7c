"""The VAE of mask-aware edits: in bfloat16 where the CPU is fast at it, and never the one of exact edits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor, nn

from core.config import EMBEDDED_MODEL, KernelChoice, ModelConfig
from model_executor.kernels import operators
from model_executor.kernels.cpu_kernels import best_kernels
from model_executor.models.base import ImageInputs
from model_executor.models.families import vae_family
from model_executor.models.families.vae_family import VaeFamily
from model_executor.models.vae.vae import copied_in_bfloat16
from model_executor.models.vae.vae_norms import moments, tile_moments, weighted_moments
from model_executor.models.vae.vae_resnets import fuse
from model_executor.worker.loading.resident import ResidentModels

EXAMPLE = Path(__file__).parents[4] / "examples" / "person.png"
SIDE = 256


def family(dtype: str, kernels: KernelChoice = "auto", path: str = EMBEDDED_MODEL) -> VaeFamily:
    models = ResidentModels.open([ModelConfig(model=path, served_model_name="m", dtype=dtype, kernels=kernels)])
    models.load_all()
    found = models.families["m"]
    assert isinstance(found, VaeFamily)
    return found


@pytest.fixture(scope="module")
def float32() -> VaeFamily:
    return family("float32")


def example() -> Tensor:
    picture = Image.open(EXAMPLE).convert("RGB").resize((SIDE, SIDE))
    return torch.from_numpy(np.asarray(picture).copy())


def encode(of: VaeFamily, *, is_exact: bool) -> tuple[Tensor, Tensor]:
    """Noise and condition of an edit with a mask in the middle."""
    mask = torch.zeros(SIDE, SIDE, dtype=torch.uint8)
    mask[96:160, 96:160] = 1
    inputs = ImageInputs(
        template=example(), mask=mask, seed=5, num_inference_steps=4, num_denoising_steps=4, is_exact=is_exact
    )
    image = of.encode_image(inputs)
    return image.latents, image.condition


@torch.inference_mode()
def test_a_mask_aware_edit_has_the_noise_of_the_exact_one_and_nearly_its_condition(
    float32: VaeFamily, fast_bfloat16: None
) -> None:
    (noise, condition), (fast_noise, fast_condition) = (encode(float32, is_exact=exact) for exact in (True, False))
    assert torch.equal(noise, fast_noise)
    assert fast_condition.dtype == torch.float32
    error = (fast_condition - condition).square().mean().sqrt() / condition.std()
    assert 0 < error < 0.01


@torch.inference_mode()
def test_exact_edits_compute_in_the_models_own_dtype(float32: VaeFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vae_family, "cpu_gains_by_bfloat16", lambda: False)
    slow = encode(float32, is_exact=True), encode(float32, is_exact=False)
    assert all(map(torch.equal, *slow)), "there is one VAE"
    latents = float32.encode_template(example())
    picture = float32.decode(latents, SIDE, SIDE)
    monkeypatch.setattr(vae_family, "cpu_gains_by_bfloat16", lambda: True)
    assert all(map(torch.equal, slow[0], encode(float32, is_exact=True)))
    assert torch.equal(float32.decode(latents, SIDE, SIDE), picture)


@torch.inference_mode()
def test_with_pytorchs_operators_alone_there_is_one_vae(fast_bfloat16: None) -> None:
    plain = family("float32", "torch")
    assert all(map(torch.equal, encode(plain, is_exact=True), encode(plain, is_exact=False)))


@pytest.mark.parametrize("has_compiler", [True, False])
@torch.inference_mode()
def test_the_error_of_bfloat16_is_below_one_level_of_255(
    has_compiler: bool, fast_bfloat16: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without compiled kernels. A box too large for a crop is decoded whole, so that nothing but the dtype
    differs."""
    if not has_compiler:
        monkeypatch.setattr(operators, "best_kernels", lambda: None)
    embedded = family("float32")
    latents = embedded.encode_template(example())
    active = torch.arange(len(latents))[: len(latents) - 16]
    region, (left, top, right, bottom) = embedded.decode_region(latents, active, SIDE, SIDE)
    whole = embedded.decode(latents, SIDE, SIDE)[top:bottom, left:right]
    error = (region.int() - whole.int()).abs().float()
    assert 0 < error.mean() < 0.5
    assert error.max() <= 4


@torch.inference_mode()
def test_a_copy_in_bfloat16_shares_the_weights_that_are_in_bfloat16_already() -> None:
    vae = AutoencoderKL.from_pretrained(EMBEDDED_MODEL, subfolder="vae").to(torch.bfloat16)
    copy = copied_in_bfloat16(vae)
    assert copy is not vae
    pairs = list(zip(vae.parameters(), copy.parameters(), strict=True))
    assert all(mine.data_ptr() == theirs.data_ptr() for mine, theirs in pairs)
    full = vae.float()
    assert all(weight.dtype == torch.bfloat16 for weight in copied_in_bfloat16(full).parameters())
    assert all(weight.dtype == torch.float32 for weight in full.parameters())


@torch.inference_mode()
def test_fused_norms_are_as_close_to_float32_as_plain_ones() -> None:
    kernels = best_kernels()
    if kernels is None:
        pytest.skip("no compiled kernels on this machine")
    exact = AutoencoderKL.from_pretrained(EMBEDDED_MODEL, subfolder="vae").float()
    plain, fused = (copied_in_bfloat16(exact).to(memory_format=torch.channels_last) for _ in range(2))
    fuse(fused, kernels)
    assert {type(layer) for layer in fused.modules()}.isdisjoint({nn.GroupNorm, nn.SiLU}), "all are fused"
    picture = example().permute(2, 0, 1)[None] / 127.5 - 1.0
    latents = exact.encode(picture).latent_dist.mode()
    decoded = exact.decode(latents).sample
    for vae in (plain, fused):
        small, rounded = picture.to(torch.bfloat16), latents.to(torch.bfloat16)
        assert (vae.encode(small).latent_dist.mode() - latents).abs().mean() < 0.01 * latents.std()
        assert (vae.decode(rounded).sample - decoded).abs().mean() < 0.5 / 127.5


def test_moments_by_kernels_are_those_by_pytorch() -> None:
    kernels = best_kernels()
    if kernels is None:
        pytest.skip("no compiled kernels on this machine")
    x = torch.randn(1, 32, 8, 24).to(torch.bfloat16, memory_format=torch.channels_last)
    torch.testing.assert_close(moments(x, 8, kernels), moments(x, 8), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tile_moments(x, 8, (2, 6), kernels), tile_moments(x, 8, (2, 6)), rtol=1e-5, atol=1e-6)
    weights = torch.rand(2, 6)
    expected = weighted_moments(x, 8, weights)
    torch.testing.assert_close(weighted_moments(x, 8, weights, kernels), expected, rtol=1e-5, atol=1e-6)
