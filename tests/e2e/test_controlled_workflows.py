"""ControlNets with what else a request may ask for, through an engine offline, against diffusers' pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from adapters import make_lora
from control_rig import lines
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    EulerDiscreteScheduler,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionXLControlNetInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
)
from edits import box_mask, picture
from hires_rig import enlarged, start_from
from PIL import Image

from core.config import AdapterConfig, ControlNetConfig, ModelConfig, RequestDefaults
from core.errors import NonFiniteError
from core.sampling_params import SamplingParams
from entrypoints import ControlPicture, Edit, ImageEngine
from tools.random_controlnets import make_sd_controlnet, make_sdxl_controlnet
from tools.random_unet_checkpoints import make_sd, make_sdxl, make_sdxl_refiner

SIZE = (128, 128)
PARAMS = SamplingParams(num_inference_steps=5, seed=5, guidance_scale=3.0, mask_aware=False)
LINES, MASK = lines(1, SIZE), box_mask(SIZE) * 255
EDIT = Edit(
    prompt="a red hat", image=picture(1, SIZE), mask_image=MASK, model="sd", controls=[ControlPicture(LINES, "edges")]
)

Pixels = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_lora(folder / "hat.safetensors", make_sd(folder / "sd", native_size=128))
    make_sd_controlnet(folder / "edges")
    broken = ControlNetModel.from_pretrained(make_sd_controlnet(folder / "broken"))
    broken.conv_in.bias.data.fill_(torch.nan)
    broken.save_pretrained(folder / "broken")
    euler: dict[str, Any] = {"scheduler_class": EulerDiscreteScheduler, "native_size": 128}
    vae = AutoencoderKL.from_pretrained(make_sdxl(folder / "sdxl", seed=1, **euler) / "vae")
    make_sdxl_refiner(folder / "refiner", seed=2, vae=vae, **euler)
    make_sdxl_controlnet(folder / "wide")
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[ImageEngine]:
    def model(name: str, *nets: str, **options: Any) -> ModelConfig:
        controlnets = tuple(ControlNetConfig(net, str(folder / net)) for net in nets)
        common: dict[str, Any] = {"dtype": "float32", "threads": 1, "served_model_name": name}
        return ModelConfig(model=str(folder / name), controlnets=controlnets, **common, **options)

    models = [
        model("sd", "edges", "broken", adapters=(AdapterConfig("hat", str(folder / "hat.safetensors")),)),
        model("sdxl", "wide", refiner="refiner", defaults=RequestDefaults(refiner_start=0.6)),
        model("refiner"),
    ]
    with ImageEngine(models=models, image_workers=1) as engine:
        yield engine


@pytest.fixture
def pipeline(folder: Path) -> Any:
    net = ControlNetModel.from_pretrained(folder / "edges")
    return of(StableDiffusionControlNetInpaintPipeline, folder / "sd", controlnet=net, safety_checker=None)


def of(kind: Any, checkpoint: Path, **options: Any) -> Any:
    made = kind.from_pretrained(checkpoint, **options)
    made.set_progress_bar_config(disable=True)
    return made


def run(pipeline: Any, *, size: tuple[int, int] = SIZE, mask: Pixels = MASK, **options: Any) -> Any:
    """What the pipeline makes of `EDIT`."""
    arguments: dict[str, Any] = {
        "prompt": EDIT.prompt,
        "image": Image.fromarray(picture(1, SIZE)),
        "mask_image": Image.fromarray(mask),
        "control_image": Image.fromarray(LINES),
        "width": size[0],
        "height": size[1],
        "num_inference_steps": 5,
        "guidance_scale": 3.0,
        "strength": 1.0,
        "generator": torch.Generator("cpu").manual_seed(5),
    }
    if isinstance(pipeline, StableDiffusionXLInpaintPipeline):  # the refiner's
        del arguments["control_image"], arguments["strength"]
    return pipeline(**(arguments | options)).images[0]


def pixels(engine: ImageEngine, edit: Edit, params: SamplingParams = PARAMS) -> Pixels:
    (result,) = engine.generate([edit], params, use_tqdm=False)
    if result.error is not None:
        raise result.error
    return np.asarray(result.images[0])


def assert_close(ours: Pixels, theirs: Any, mask: Pixels = MASK) -> None:
    assert np.abs(ours.astype(int) - np.asarray(theirs))[mask > 0].max() <= 2


def test_an_adapter_changes_the_base_alone(engine: ImageEngine, folder: Path, pipeline: Any) -> None:
    pipeline.load_lora_weights(str(folder / "hat.safetensors"))
    assert_close(pixels(engine, replace(EDIT, lora="hat")), run(pipeline))


def test_a_crop_is_that_of_the_picture(engine: ImageEngine, pipeline: Any) -> None:
    mask = np.zeros_like(MASK)
    mask[40:56, 40:72] = 255
    ours = pixels(engine, replace(EDIT, mask_image=mask, padding_mask_crop=16))
    assert_close(ours, run(pipeline, mask=mask, padding_mask_crop=16), mask)


def test_both_passes_are_steered(engine: ImageEngine, pipeline: Any) -> None:
    ours = pixels(engine, EDIT, msgspec.structs.replace(PARAMS, hires_scale=2, hires_strength=0.6))
    first_size = (SIZE[0] // 2, SIZE[1] // 2)
    small = run(pipeline, size=first_size, output_type="latent")
    with pytest.MonkeyPatch.context() as patch:
        start_from(patch, pipeline.scheduler, enlarged(pipeline, small, first_size, SIZE))
        assert_close(ours, run(pipeline, strength=0.6))


def test_a_refiner_goes_on_without(engine: ImageEngine, folder: Path) -> None:
    ours = pixels(engine, replace(EDIT, model="sdxl", controls=[ControlPicture(LINES)]))
    net, kind = ControlNetModel.from_pretrained(folder / "wide"), StableDiffusionXLControlNetInpaintPipeline
    base = of(kind, folder / "sdxl", controlnet=net, add_watermarker=False)
    latents = run(base, denoising_end=0.6, output_type="latent", controlnet_conditioning_scale=1.0)
    refiner = of(StableDiffusionXLInpaintPipeline, folder / "refiner", add_watermarker=False)
    assert_close(ours, run(refiner, image=latents[None], denoising_start=0.6))


def test_a_controlnet_that_makes_no_numbers_fails_its_own_edit(engine: ImageEngine) -> None:
    alone = pixels(engine, EDIT)
    broken = replace(EDIT, controls=[ControlPicture(LINES, "broken")])
    failed, beside = engine.generate([broken, EDIT], PARAMS, use_tqdm=False)
    assert isinstance(failed.error, NonFiniteError)
    assert np.array_equal(np.asarray(beside.images[0]), alone)
