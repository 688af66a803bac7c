"""Pictures on their way to the VAE and from it: their bits, and the devices that they are on."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.compare.checkpoints import MAKERS
from core.config import ModelConfig
from model_executor.models.base import ImageInputs
from model_executor.models.families import vae_family
from model_executor.models.families.vae_family import VaeFamily, to_image, to_pixels
from model_executor.models.vae.picture_key import PictureKey
from model_executor.worker.loading.resident import ResidentModels

GPU = torch.device("meta")
SIDE = 32
FAMILIES = sorted(MAKERS)
FROM_TEMPLATE = ["flux", "flux_kontext", "klein", "sd3", "qwen", "qwen_edit", "qwen_edit_plus", "z_image", "sd"]
"""Families that encode the whole template wherever they start from."""

EDIT: dict[str, Any] = {"seed": 5, "num_inference_steps": 4, "num_denoising_steps": 3}


def family(name: str, folder: Path, dtype: str = "float32") -> VaeFamily:
    path = MAKERS[name](folder / name)
    models = ResidentModels.open([ModelConfig(model=str(path), served_model_name="m", dtype=dtype)])
    models.load_all()
    found = models.families["m"]
    assert isinstance(found, VaeFamily)
    return found


def picture(seed: int = 0, side: int = SIDE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (side, side, 3), generator=generator, dtype=torch.uint8)


def mask() -> Tensor:
    inside = torch.zeros(SIDE, SIDE, dtype=torch.uint8)
    inside[8:24, 8:24] = 1
    return inside


# ------------------------------------------------------------------------------------------------------------- bits


def test_pictures_are_divided_as_by_a_number_on_a_cpu() -> None:
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 256, 1).expand(2, 256, 3)
    expected = (levels.permute(2, 0, 1)[None].float() / 255.0) * 2.0 - 1.0
    assert torch.equal(to_image(levels), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_pixels_are_rounded_as_by_diffusers(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    generator = torch.Generator().manual_seed(1)
    image = (torch.randn(1, 3, 48, 32, generator=generator)).to(dtype, memory_format=memory_format)
    scaled = (image * 0.5 + 0.5).clamp(0, 1)[0].permute(1, 2, 0).float().numpy()
    pixels = to_pixels(image)
    assert pixels.is_contiguous()
    assert torch.equal(pixels, torch.from_numpy((scaled * 255).round().astype("uint8")))


# ------------------------------------------------------------------------------------------------------ kept posterior


class Encoder:
    """Counts the runs of a family's encoder."""

    def __init__(self, of: VaeFamily) -> None:
        self.runs = 0
        of._vae._module.encoder.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.runs += 1


def encoded(of: VaeFamily, template: Tensor, under: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    """under: the mask; None: `mask`."""
    inside = mask() if under is None else under
    image = of.encode_image(ImageInputs(template=template, mask=inside, **EDIT, **options))
    return image.latents, image.condition, image.outside


@pytest.mark.parametrize("name", FROM_TEMPLATE)
@torch.inference_mode()
def test_two_ops_encode_a_picture_once(name: str, tmp_path: Path, slow_bfloat16: None) -> None:
    ours = family(name, tmp_path)
    encoder, arena = Encoder(ours), picture()
    clean, expected = ours.encode_template(arena), encoded(ours, arena)
    assert encoder.runs == 2, "without a salt nothing is kept"
    assert torch.equal(ours.encode_template(arena, cache_salt=""), clean)
    assert all(map(torch.equal, encoded(ours, arena.clone(), cache_salt=""), expected))
    assert torch.equal(ours.encode_template(arena, cache_salt=""), clean)
    assert encoder.runs == 3
    assert all(map(torch.equal, encoded(ours, arena), expected))
    assert encoder.runs == 4, "a probe measures the encoder"


@pytest.mark.parametrize("name", ["flux_fill", "sd_inpaint"])
@torch.inference_mode()
def test_a_masked_picture_is_kept_besides_the_whole_one(name: str, tmp_path: Path, slow_bfloat16: None) -> None:
    """The denoiser sees it. With a strength below 1 sampling starts from the whole picture."""
    ours, under = family(name, tmp_path), mask()
    encoder, expected = Encoder(ours), encoded(ours, picture())
    assert encoder.runs == 2, "without a salt nothing is kept"
    for _ in range(2):
        ours.encode_template(picture(), cache_salt="")
        assert all(map(torch.equal, encoded(ours, picture(), under, cache_salt=""), expected))
        assert encoder.runs == 4
    under[0, 0] = 1  # another mask in the same memory
    assert all(map(torch.equal, encoded(ours, picture(), under, cache_salt=""), encoded(ours, picture(), under)))
    assert encoder.runs == 4 + 1 + 2


@torch.inference_mode()
def test_other_pictures_owners_and_vaes_are_told_apart(tmp_path: Path, fast_bfloat16: None) -> None:
    ours = family("flux", tmp_path)
    encoder, arena = Encoder(ours), picture()
    expected = {seed: ours.encode_template(picture(seed)) for seed in (0, 1)}
    assert encoder.runs == 0, "templates are encoded in bfloat16, by another VAE"
    known = encoded(ours, arena)
    ours.encode_template(arena, cache_salt="")
    assert all(map(torch.equal, encoded(ours, arena, cache_salt="", is_exact=True), known))
    assert encoder.runs == 2
    arena.copy_(picture(1))  # the next picture in the same memory
    assert torch.equal(ours.encode_template(arena, cache_salt=""), expected[1])
    assert torch.equal(ours.encode_template(picture(), cache_salt=""), expected[0])
    for runs, salt in ((3, "one"), (4, "another"), (5, "one"), (5, "one")):
        encoded(ours, picture(), cache_salt=salt)
        assert encoder.runs == runs
    assert not PictureKey(picture(), "").equals(PictureKey(picture(side=16), ""))


# ------------------------------------------------------------------------------------------------------ on a GPU


class Apart(TorchDispatchMode):
    """The meta device as a GPU: within it, operators refuse to mix it with the host, except for scalars, and what is
    copied from it to the host is zeros."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        wanted = kwargs or {}
        target = next((x for x in (*args, *wanted.values()) if isinstance(x, torch.device)), GPU)
        if func.overloadpacket is torch.ops.aten.to and args[0].is_meta and target != GPU:
            return torch.zeros(args[0].shape, dtype=wanted.get("dtype") or args[0].dtype, device=target)
        leaves = [leaf for leaf in tree_leaves((args, wanted)) if isinstance(leaf, Tensor)]
        places = {leaf.device.type for leaf in leaves if leaf.dim() or leaf.is_meta}
        assert len(places) < 2, f"{func} on {places}"
        return func(*args, **wanted)


def on_gpu(of: VaeFamily, *, is_prepared_there: bool) -> VaeFamily:
    """The family with its VAE on the meta device. is_prepared_there: else it comes there later, from the host."""
    of._device = GPU
    vae = of.vae(of._checkpoint.outline("vae") if is_prepared_there else of._checkpoint.load("vae"), device=GPU)
    for module in vae._used_modules:
        module.to(GPU)
    of.put("vae", vae)
    return of


@pytest.mark.parametrize(("name", "is_prepared_there"), [*product(FAMILIES, [True]), *product(FAMILIES, [False])])
@torch.inference_mode()
def test_families_mix_no_devices(
    name: str, is_prepared_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether template and mask are on the host, or on the GPU as the VAE is."""
    ours = on_gpu(family(name, tmp_path), is_prepared_there=is_prepared_there)
    rows, columns = ours.grid(SIDE, SIDE)
    host = picture(), mask()
    there = picture().to(GPU), mask().to(GPU)
    with Apart():
        clean = ours.encode_template(there[0])
        assert ours.encode_template(host[0], cache_salt="").shape == clean.shape
        for (template, inside), num_steps in product((host, there), (3, 4)):
            salt = None if template.is_meta else ""  # without values, none are compared
            for start in (None, clean):
                inputs = ImageInputs(
                    template=template,
                    mask=inside,
                    seed=5,
                    num_inference_steps=4,
                    num_denoising_steps=num_steps,
                    start=start,
                    cache_salt=salt,
                )
                image = ours.encode_image(inputs)
                made = image.latents, image.condition, image.outside
                assert {x.device for x in (*made, image.sigmas, clean)} == {GPU}
                assert {len(x) for x in (*made, clean)} == {rows * columns}
        active = torch.arange(1, device=GPU)
        # The box and the tiles around it depend on values.
        monkeypatch.setattr(vae_family, "around", lambda *_: (0, 0, columns, rows))
        region, _ = ours.decode_region(clean, active, SIDE, SIDE)
        for pixels in (ours.decode(clean, SIDE, SIDE), region):
            assert (pixels.device.type, pixels.dtype) == ("cpu", torch.uint8)
