"""Workflows of two passes, written in the language: they make the pictures of the shipped workflows bit for bit, and
those of diffusers' pipelines, alone, in company, on several ranks, and when one of these dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import psutil
import pytest
import pytest_asyncio
from adapters import make_lora
from diffusers import FluxFillPipeline
from edits import box_mask, picture
from engines import serving_engine
from fault_kit import file_of, processes
from hires_rig import two_calls
from pictures import Pixels, decode
from pipeline_rig import PROMPT
from refined_rig import GUIDANCE, SEED, SOLVERS, Asked, Composition

from core.config import AdapterConfig, EngineConfig, ModelConfig, SchedulerConfig, StencilConfig
from core.lora import Lora
from core.sampling_params import SamplingParams
from engine.client.async_engine import AsyncEngine
from engine.client.edit_types import EditInput
from engine.client.upload import BytesUpload
from entrypoints.workflows.workflow_files import read_workflows

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "workflows"
FILES = [EXAMPLES / "hires.py", EXAMPLES / "two_loras_refined.py"]
LORAS = {"style": 0.8, "subject": 0.5}
SIZE = (96, 128)
HIRES = SamplingParams(num_inference_steps=6, seed=SEED, hires_scale=2.0, hires_strength=0.7)
REFINED = SamplingParams(num_inference_steps=6, seed=SEED, guidance_scale=GUIDANCE, refiner_start=0.6)


@dataclass(frozen=True)
class Case:
    """What is asked of a model with a workflow of a file, and of one with the shipped workflow."""

    written: str  # the one model
    shipped: str  # the other
    edit: EditInput
    loras: tuple[Lora, ...] = ()  # that a request to the other asks for


def asked(sampling: SamplingParams, is_edit: bool) -> EditInput:
    if not is_edit:
        return EditInput(prompt=PROMPT, sampling=sampling, canvas_size=SIZE)
    image, mask = (BytesUpload(file_of(pixels)) for pixels in (picture(SEED, SIZE), box_mask(SIZE) * 255))
    return EditInput(prompt=PROMPT, sampling=sampling, image=image, mask=mask, mask_kind="luminance")


NAMED = tuple(Lora(f"{name}_asked", scale) for name, scale in LORAS.items())
CASES = {
    "hires edit": Case("two_passes", "fill", asked(HIRES, is_edit=True)),
    "hires picture": Case("two_passes", "fill", asked(HIRES, is_edit=False)),
    "refined edit": Case("two_loras_refined", "base", asked(REFINED, is_edit=True), NAMED),
    "refined picture": Case("two_loras_refined", "base", asked(REFINED, is_edit=False), NAMED),
}


@dataclass(frozen=True)
class Models:
    """Checkpoints, and the pictures of diffusers' pipelines, by case."""

    fill: Path
    base: Path
    refiner: Path
    loras: Mapping[str, Path]
    pictures: Mapping[str, Pixels]


@pytest.fixture(scope="module")
def models(tiny_checkpoint: Path, pipeline: FluxFillPipeline, tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    composed = Composition(folder, SOLVERS["euler"], SOLVERS["ancestral"])
    base, refiner = composed.paths
    loras = {
        "style": make_lora(folder / "style.safetensors", base, text_parts=("text_encoder", "text_encoder_2")),
        "subject": make_lora(folder / "subject.safetensors", base, r".*attn\d?\..*", seed=2),
    }
    with catch_warnings():
        simplefilter("ignore")  # peft asks whether several adapters are meant
        for name, file in loras.items():
            composed.base.load_lora_weights(str(file), adapter_name=name)
    composed.base.set_adapters(list(LORAS), list(LORAS.values()))
    pictures = {}
    for kind, is_edit in (("edit", True), ("picture", False)):
        request = Asked(6, 0.6, is_edit=is_edit, size=SIZE)
        mask = request.mask
        image = request.template if is_edit else np.full_like(request.template, 128)
        pictures[f"refined {kind}"] = composed.picture(request)
        pictures[f"hires {kind}"] = two_calls(pipeline, PROMPT, image, mask, HIRES, (48, 64))
    return Models(tiny_checkpoint, base, refiner, loras, pictures)


@pytest_asyncio.fixture(params=[1, 3], scope="module", loop_scope="module")
async def engine(request: pytest.FixtureRequest, models: Models) -> AsyncIterator[AsyncEngine]:
    def model(path: Path, name: str, **settings: Any) -> ModelConfig:
        return ModelConfig(
            model=str(path), served_model_name=name, dtype="float32", device="cpu", threads=1, **settings
        )

    def adapters(suffix: str = "") -> tuple[AdapterConfig, ...]:
        return tuple(AdapterConfig(f"{name}{suffix}", str(file)) for name, file in models.loras.items())

    read = read_workflows(FILES)
    config = EngineConfig(
        models=(
            model(models.fill, "fill"),
            model(models.fill, "two_passes", workflow="two_passes"),
            model(models.refiner, "polish"),
            model(models.base, "base", refiner="polish", adapters=adapters("_asked")),
            model(
                models.base,
                "two_loras_refined",
                workflow="two_loras_refined",
                refiner="polish",
                adapters=adapters(),
            ),
        ),
        scheduler=SchedulerConfig(max_retries=100),
        workers_per_engine=request.param,
        classes=read.classes,
        workflows=read.workflows,
    )
    async with serving_engine(StencilConfig(engine=config, arena_bytes=2**27)) as serving:
        yield serving


async def made(engine: AsyncEngine, model: str, edit: EditInput, loras: tuple[Lora, ...] = ()) -> Pixels:
    choice = engine.choose_model(model, loras)
    async with engine.edit(f"{model}-{id(edit)}-{len(loras)}", edit, choice) as outputs:
        *_, data = [bytes(output.data) async for output in outputs]
    return decode(data)[..., :3]


async def written(engine: AsyncEngine, case: Case) -> Pixels:
    return await made(engine, case.written, replace(case.edit))


@pytest.mark.parametrize("name", CASES)
async def test_pictures_are_those_of_the_shipped_workflow_and_of_diffusers(
    engine: AsyncEngine, models: Models, name: str
) -> None:
    case, expected = CASES[name], models.pictures[name]
    ours = await written(engine, case)
    np.testing.assert_array_equal(ours, await made(engine, case.shipped, case.edit, case.loras))
    inside = box_mask(SIZE) > 0 if case.edit.image is not None else np.ones(expected.shape[:2], bool)
    assert np.abs(ours.astype(int) - expected)[inside].max() <= 2
    if case.loras:
        assert (await made(engine, case.shipped, case.edit, case.loras[:1]) != ours).any()


async def test_company_changes_no_bit(engine: AsyncEngine) -> None:
    alone = {name: await written(engine, case) for name, case in CASES.items()}
    crowd = [made(engine, case.shipped, replace(case.edit)) for case in CASES.values()]
    *together, _, _, _, _ = await asyncio.gather(*(written(engine, case) for case in CASES.values()), *crowd)
    for name, pixels in zip(CASES, together, strict=True):
        np.testing.assert_array_equal(pixels, alone[name])


async def test_a_death_changes_no_bit(engine: AsyncEngine) -> None:
    """When the first partial image has come: its request has steps left to do, and the others run or wait."""
    alone = {name: await written(engine, case) for name, case in CASES.items()}
    dead = list[psutil.Process]()

    async def disturbed(case: Case) -> Pixels:
        edit = replace(case.edit, partial_images=1)
        async with engine.edit(f"dying-{id(edit)}", edit, engine.choose_model(case.written)) as outputs:
            async for output in outputs:
                if output.partial_index is not None and not dead:
                    dead.append(processes("worker")[-1])
                    dead[0].kill()
                data = bytes(output.data)
        return decode(data)[..., :3]

    pictures = await asyncio.gather(*map(disturbed, CASES.values()))
    assert dead
    assert dead[0] not in processes("worker")
    for name, pixels in zip(CASES, pictures, strict=True):
        np.testing.assert_array_equal(pixels, alone[name])
