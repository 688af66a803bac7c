"""ControlNets through an engine offline and behind the API, against diffusers' pipeline and against each alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from control_rig import lines
from diffusers import (
    ControlNetModel,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionControlNetPipeline,
)
from edits import box_mask, picture
from fault_kit import processes
from PIL import Image

from core.config import ControlNetConfig, ModelConfig
from core.errors import InvalidRequestError
from core.sampling_params import SamplingParams
from entrypoints import ControlPicture, Edit, ImageEngine
from tools.random_checkpoints import make_flux
from tools.random_controlnets import make_flux_controlnet, make_sd_controlnet
from tools.random_unet_checkpoints import make_sd

SIZE = (256, 192)
COMMON: dict[str, Any] = {"dtype": "float32", "threads": 1, "cache_dtype": "float32", "cache_keyframes": "per-step"}
PARAMS = SamplingParams(num_inference_steps=4, seed=5, guidance_scale=3.0)
PROMPT = "a red hat"
LINES = lines(1, SIZE)

Pixels = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_sd(folder / "sd", native_size=256)
    make_flux(folder / "flux", native_size=256, guidance_embeds=True)
    for seed, name in enumerate(("edges", "depth"), 1):
        make_sd_controlnet(folder / name, seed=seed)
    make_flux_controlnet(folder / "union", num_mode=2, guidance_embeds=True)
    return folder


def small_mask() -> Pixels:
    mask = np.zeros((SIZE[1], SIZE[0]), np.uint8)
    mask[64:128, 96:160] = 255
    return mask


def edit(*controls: ControlPicture, mask: Pixels | None = None, model: str = "sd") -> Edit:
    mask = box_mask(SIZE) * 255 if mask is None else mask
    return Edit(prompt=PROMPT, image=picture(1, SIZE), mask_image=mask, controls=controls, model=model)


EDGES, DEPTH = ControlPicture(LINES, "edges"), ControlPicture(lines(2, SIZE), "depth", scale=0.8, end=0.6)
CANNY = ControlPicture(LINES, "canny", scale=0.4)
EDITS = {
    "plain": edit(),
    "edges": edit(EDGES),
    "both": edit(EDGES, DEPTH),
    "generation": Edit(prompt=PROMPT, size=(160, 160), controls=[ControlPicture(lines(3, (320, 320)), "depth")]),
    "masked": edit(EDGES, mask=small_mask()),
    "masked, plain": edit(mask=small_mask()),
    "flux": edit(CANNY, ControlPicture(lines(2, SIZE), "tile", start=0.2), model="flux"),
    "flux masked": edit(CANNY, mask=small_mask(), model="flux"),
    "flux masked, plain": edit(mask=small_mask(), model="flux"),
}
EXACT = SamplingParams(num_inference_steps=4, seed=5, guidance_scale=3.0, mask_aware=False)


def open_engine(folder: Path, **options: Any) -> ImageEngine:
    nets = tuple(ControlNetConfig(name, str(folder / name)) for name in ("edges", "depth"))
    union = ControlNetConfig("union", str(folder / "union"), {"canny": 0, "tile": 1})
    models = [
        ModelConfig(model=str(folder / "sd"), served_model_name="sd", controlnets=nets, **COMMON),
        ModelConfig(model=str(folder / "flux"), served_model_name="flux", controlnets=(union,), **COMMON),
    ]
    return ImageEngine(models=models, image_workers=1, **options)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[ImageEngine]:
    with open_engine(folder) as engine:
        yield engine


def pixels(engine: ImageEngine, edits: list[Edit], params: SamplingParams = PARAMS) -> list[Pixels]:
    results = engine.generate(edits, params, use_tqdm=False)
    assert [result.error for result in results if result.error is not None] == []
    return [np.asarray(result.images[0]) for result in results]


@pytest.fixture(scope="module")
def alone(engine: ImageEngine) -> dict[str, Pixels]:
    return {name: pixels(engine, [each])[0] for name, each in EDITS.items()}


def of_pipeline(kind: Any, folder: Path, net: str, **arguments: Any) -> Pixels:
    """The picture of diffusers' pipeline with this ControlNet."""
    parts = {"safety_checker": None, "requires_safety_checker": False}
    controlnet = ControlNetModel.from_pretrained(folder / net)
    pipeline = kind.from_pretrained(folder / "sd", controlnet=controlnet, **parts)
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(prompt=PROMPT, num_inference_steps=4, guidance_scale=3.0, **arguments).images[0]
    return np.asarray(made)


def test_an_edit_equals_the_pipeline(engine: ImageEngine, folder: Path) -> None:
    mask = box_mask(SIZE)
    expected = of_pipeline(
        StableDiffusionControlNetInpaintPipeline,
        folder,
        "edges",
        image=Image.fromarray(picture(1, SIZE)),
        mask_image=Image.fromarray(mask * 255),
        control_image=Image.fromarray(LINES),
        width=SIZE[0],
        height=SIZE[1],
        strength=1.0,
        generator=torch.Generator("cpu").manual_seed(5),
    )
    (ours,) = pixels(engine, [EDITS["edges"]], EXACT)
    inside = mask > 0
    assert np.abs(ours.astype(int) - expected)[inside].max() <= 2
    assert np.array_equal(ours[~inside], picture(1, SIZE)[~inside])


def test_a_generation_equals_the_pipeline(folder: Path, alone: dict[str, Pixels]) -> None:
    """From the noise of a generation, which is drawn as an edit of an empty canvas draws it."""
    generator = torch.Generator("cpu").manual_seed(5)
    _, noise = (torch.randn(1, 4, 20, 20, generator=generator) for _ in range(2))
    control = Image.fromarray(lines(3, (320, 320))).resize((160, 160), Image.Resampling.LANCZOS)
    expected = of_pipeline(StableDiffusionControlNetPipeline, folder, "depth", image=control, latents=noise)
    assert np.abs(alone["generation"].astype(int) - expected).max() <= 2


def test_company_changes_no_bit(engine: ImageEngine, alone: dict[str, Pixels]) -> None:
    together = pixels(engine, [*EDITS.values()])
    for (name, before), after in zip(alone.items(), together, strict=True):
        assert np.array_equal(before, after), name


def test_two_ranks_change_no_bit(folder: Path, alone: dict[str, Pixels]) -> None:
    """They share the rows of each step; ControlNets run on one."""
    with open_engine(folder, workers_per_engine=2, degree=2) as engine:
        together = pixels(engine, [*EDITS.values()])
    for (name, before), after in zip(alone.items(), together, strict=True):
        assert np.array_equal(before, after), name


@pytest.fixture(scope="module")
def beside(folder: Path) -> Iterator[ImageEngine]:
    """Two ranks, and it is known what batches take."""
    with open_engine(folder, workers_per_engine=2) as engine:
        for name in ("edges", "edges", "flux", "flux"):
            pixels(engine, [EDITS[name]])
        yield engine


def test_a_controlnet_on_a_rank_of_its_own_changes_no_bit(beside: ImageEngine, alone: dict[str, Pixels]) -> None:
    before = [sum(each.cpu_times()[:2]) for each in processes("worker")[-2:]]
    for name in ("edges", "both", "masked", "generation", "flux", "flux masked"):
        assert np.array_equal(pixels(beside, [EDITS[name]])[0], alone[name]), name
    worked = [sum(each.cpu_times()[:2]) - was for each, was in zip(processes("worker")[-2:], before, strict=True)]
    assert min(worked) >= 0.1 * max(worked), "one rank did all of it"


def test_company_of_controlnets_beside_changes_no_bit(beside: ImageEngine, alone: dict[str, Pixels]) -> None:
    together = pixels(beside, [*EDITS.values()])
    for (name, before), after in zip(alone.items(), together, strict=True):
        assert np.array_equal(before, after), name


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_either_rank_changes_no_bit(beside: ImageEngine, alone: dict[str, Pixels], rank: int) -> None:
    victim = processes("worker")[-2:][rank]
    killing = threading.Timer(0.3, victim.kill)
    killing.start()
    names = ["edges", "flux"] * 2
    together = pixels(beside, [EDITS[name] for name in names])
    killing.join()
    assert not victim.is_running()
    for name, after in zip(names, together, strict=True):
        assert np.array_equal(alone[name], after), name


@pytest.mark.parametrize("name", ["masked", "flux masked"])
def test_a_masked_step_adds_what_an_exact_one_does(engine: ImageEngine, alone: dict[str, Pixels], name: str) -> None:
    """The error of a mask-aware edit is hardly larger with a ControlNet, which sees the box or the active tokens
    alone."""
    inside = small_mask() > 0

    def error(name: str) -> float:
        (exact,) = pixels(engine, [EDITS[name]], EXACT)
        return float(np.abs(exact.astype(float) - alone[name])[inside].mean())

    plain = f"{name}, plain"
    change = np.abs(alone[name].astype(float) - alone[plain])[inside].mean()
    assert change > 5, "the ControlNet changes nothing"
    assert error(name) <= 1.15 * error(plain)


def test_what_cannot_be_done_is_refused(engine: ImageEngine) -> None:
    bad = [
        edit(ControlPicture(LINES, "pose")),
        edit(ControlPicture(LINES)),
        edit(ControlPicture(LINES[:, :192], "edges")),
        edit(*[EDGES] * 5),
        edit(EDGES, model="flux"),
    ]
    errors = [result.error for result in engine.generate(bad, PARAMS, use_tqdm=False)]
    assert [type(error) for error in errors] == [InvalidRequestError] * 5
    assert [error.param for error in errors if isinstance(error, InvalidRequestError)] == [
        "control_type",
        "control_type",
        "control_image",
        "control_image",
        "control_type",
    ]


def test_a_controlnet_of_another_model_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    make_sd_controlnet(tmp_path / "wide", block_out_channels=(16, 32, 64))
    net = ControlNetConfig("wide", str(tmp_path / "wide"))
    model = ModelConfig(model=str(folder / "sd"), controlnets=(net,), **COMMON)
    with pytest.raises(Exception, match=r"controlnets: wide: .*block_out_channels"):
        ImageEngine(models=[model], image_workers=1)
