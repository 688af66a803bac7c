"""ControlNets through an engine offline and behind the API, against diffusers' pipeline and against each alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from control_rig import lines
from controlled_models import make_models, models_in
from diffusers import (
    ControlNetModel,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionXLControlNetInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
)
from edits import box_mask, picture
from fault_kit import processes
from hires_rig import enlarged, start_from
from PIL import Image

from core.errors import InvalidRequestError, NonFiniteError
from core.sampling_params import SamplingParams
from entrypoints import ControlPicture, Edit, ImageEngine

SIZE = (128, 96)
LARGE = (256, 192)  # of FLUX, whose mask-aware steps are good only in pictures of some tokens
PARAMS = SamplingParams(num_inference_steps=4, seed=5, guidance_scale=3.0)
PROMPT = "a red hat"
LINES = lines(1, SIZE)

Pixels = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[ImageEngine]:
    with ImageEngine(models=models_in(folder), image_workers=1) as engine:
        yield engine


def small_mask(size: tuple[int, int] = SIZE) -> Pixels:
    """A third of the height, and a quarter of the width."""
    width, height = size
    mask = np.zeros((height, width), np.uint8)
    mask[height // 3 : 2 * height // 3, 3 * width // 8 : 5 * width // 8] = 255
    return mask


def edit(*controls: ControlPicture, mask: Pixels | None = None, model: str = "sd") -> Edit:
    size = LARGE if model == "flux" else SIZE
    mask = box_mask(size) * 255 if mask is None else mask
    return Edit(prompt=PROMPT, image=picture(1, size), mask_image=mask, controls=controls, model=model)


EDGES, DEPTH = ControlPicture(LINES, "edges"), ControlPicture(lines(2, SIZE), "depth", scale=0.8, end=0.6)
CANNY = ControlPicture(lines(1, LARGE), "canny", scale=0.4)
EDITS = {
    "plain": edit(),
    "edges": edit(EDGES),
    "both": edit(EDGES, DEPTH),
    "generation": Edit(prompt=PROMPT, size=(96, 96), controls=[ControlPicture(lines(3, (192, 192)), "depth")]),
    "masked": edit(EDGES, mask=small_mask()),
    "masked, plain": edit(mask=small_mask()),
    "flux": edit(CANNY, ControlPicture(lines(2, LARGE), "tile", start=0.2), model="flux"),
    "flux masked": edit(CANNY, mask=small_mask(LARGE), model="flux"),
    "flux masked, plain": edit(mask=small_mask(LARGE), model="flux"),
}
EXACT = SamplingParams(num_inference_steps=4, seed=5, guidance_scale=3.0, mask_aware=False)


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
    _, noise = (torch.randn(1, 4, 12, 12, generator=generator) for _ in range(2))
    control = Image.fromarray(lines(3, (192, 192))).resize((96, 96), Image.Resampling.LANCZOS)
    expected = of_pipeline(StableDiffusionControlNetPipeline, folder, "depth", image=control, latents=noise)
    assert np.abs(alone["generation"].astype(int) - expected).max() <= 2


def test_company_changes_no_bit(engine: ImageEngine, alone: dict[str, Pixels]) -> None:
    together = pixels(engine, [*EDITS.values()])
    for (name, before), after in zip(alone.items(), together, strict=True):
        assert np.array_equal(before, after), name


def test_two_ranks_change_no_bit(folder: Path, alone: dict[str, Pixels]) -> None:
    """They share the rows of each step; ControlNets run on one."""
    of_two = {"workers_per_engine": 2, "degree": 2}
    with ImageEngine(models=models_in(folder)[:2], image_workers=1, **of_two) as engine:
        together = pixels(engine, [*EDITS.values()])
    for (name, before), after in zip(alone.items(), together, strict=True):
        assert np.array_equal(before, after), name


@pytest.fixture(scope="module")
def beside(folder: Path, alone: dict[str, Pixels]) -> Iterator[ImageEngine]:
    """Two ranks, whose processes are the last to start, and it is known what batches take."""
    with ImageEngine(models=models_in(folder)[:2], image_workers=1, workers_per_engine=2) as engine:
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
    killing = threading.Timer(0.2, victim.kill)
    killing.start()
    names = ["edges", "flux"] * 8
    together = pixels(beside, [EDITS[name] for name in names])
    assert not killing.is_alive(), "all was done before"
    victim.wait(10)
    for name, after in zip(names, together, strict=True):
        assert np.array_equal(alone[name], after), name


def test_ranks_that_share_its_steps_change_no_bit(folder: Path, alone: dict[str, Pixels]) -> None:
    with ImageEngine(models=models_in(folder)[:2], image_workers=1, workers_per_engine=2, degree=2) as shared:
        for name in ("edges", "both", "masked", "flux", "flux masked"):
            assert np.array_equal(pixels(shared, [EDITS[name]])[0], alone[name]), name


@pytest.mark.parametrize("name", ["masked", "flux masked"])
def test_a_masked_step_adds_what_an_exact_one_does(engine: ImageEngine, alone: dict[str, Pixels], name: str) -> None:
    """The error of a mask-aware edit is hardly larger with a ControlNet, which sees the box or the active tokens
    alone."""
    inside = small_mask(LARGE if name == "flux masked" else SIZE) > 0

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
        edit(ControlPicture(LINES[:, :96], "edges")),
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


# -------------------------------------------------------------------------------- with what else a request may ask for

SQUARE = (128, 128)
STEPS = SamplingParams(num_inference_steps=5, seed=5, guidance_scale=3.0, mask_aware=False)
SQUARE_LINES, BOX = lines(1, SQUARE), box_mask(SQUARE) * 255
SQUARE_EDIT = Edit(
    prompt=PROMPT,
    image=picture(1, SQUARE),
    mask_image=BOX,
    model="sd",
    controls=[ControlPicture(SQUARE_LINES, "edges")],
)


def one(engine: ImageEngine, edit: Edit, params: SamplingParams = STEPS) -> Pixels:
    return pixels(engine, [edit], params)[0]


@pytest.fixture
def pipeline(folder: Path) -> Any:
    net = ControlNetModel.from_pretrained(folder / "edges")
    return of(StableDiffusionControlNetInpaintPipeline, folder / "sd", controlnet=net, safety_checker=None)


def of(kind: Any, checkpoint: Path, **options: Any) -> Any:
    made = kind.from_pretrained(checkpoint, **options)
    made.set_progress_bar_config(disable=True)
    return made


def run(pipeline: Any, *, size: tuple[int, int] = SQUARE, mask: Pixels = BOX, **options: Any) -> Any:
    """What the pipeline makes of `SQUARE_EDIT`."""
    arguments: dict[str, Any] = {
        "prompt": SQUARE_EDIT.prompt,
        "image": Image.fromarray(picture(1, SQUARE)),
        "mask_image": Image.fromarray(mask),
        "control_image": Image.fromarray(SQUARE_LINES),
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


def assert_close(ours: Pixels, theirs: Any, mask: Pixels = BOX) -> None:
    assert np.abs(ours.astype(int) - np.asarray(theirs))[mask > 0].max() <= 2


def test_an_adapter_changes_the_base_alone(engine: ImageEngine, folder: Path, pipeline: Any) -> None:
    pipeline.load_lora_weights(str(folder / "hat.safetensors"))
    assert_close(one(engine, replace(SQUARE_EDIT, lora="hat")), run(pipeline))


def test_a_crop_is_that_of_the_picture(engine: ImageEngine, pipeline: Any) -> None:
    mask = np.zeros_like(BOX)
    mask[40:56, 40:72] = 255
    ours = one(engine, replace(SQUARE_EDIT, mask_image=mask, padding_mask_crop=16))
    assert_close(ours, run(pipeline, mask=mask, padding_mask_crop=16), mask)


def test_both_passes_are_steered(engine: ImageEngine, pipeline: Any) -> None:
    ours = one(engine, SQUARE_EDIT, msgspec.structs.replace(STEPS, hires_scale=2, hires_strength=0.6))
    first_size = (SQUARE[0] // 2, SQUARE[1] // 2)
    small = run(pipeline, size=first_size, output_type="latent")
    with pytest.MonkeyPatch.context() as patch:
        start_from(patch, pipeline.scheduler, enlarged(pipeline, small, first_size, SQUARE))
        assert_close(ours, run(pipeline, strength=0.6))


def test_a_refiner_goes_on_without(engine: ImageEngine, folder: Path) -> None:
    ours = one(engine, replace(SQUARE_EDIT, model="sdxl", controls=[ControlPicture(SQUARE_LINES)]))
    net, kind = ControlNetModel.from_pretrained(folder / "wide"), StableDiffusionXLControlNetInpaintPipeline
    base = of(kind, folder / "sdxl", controlnet=net, add_watermarker=False)
    latents = run(base, denoising_end=0.6, output_type="latent", controlnet_conditioning_scale=1.0)
    refiner = of(StableDiffusionXLInpaintPipeline, folder / "refiner", add_watermarker=False)
    assert_close(ours, run(refiner, image=latents[None], denoising_start=0.6))


def test_a_controlnet_that_makes_no_numbers_fails_its_own_edit(engine: ImageEngine) -> None:
    alone = one(engine, SQUARE_EDIT)
    broken = replace(SQUARE_EDIT, controls=[ControlPicture(SQUARE_LINES, "broken")])
    failed, beside = engine.generate([broken, SQUARE_EDIT], STEPS, use_tqdm=False)
    assert isinstance(failed.error, NonFiniteError)
    assert np.array_equal(np.asarray(beside.images[0]), alone)
