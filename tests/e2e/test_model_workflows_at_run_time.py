"""The examples that make a model's pictures, registered while engines serve: they are those of the same files given at
the start, alone, in company, on several ranks, and when workers and engines die.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from adapters import make_lora
from control_rig import lines
from diffusers import FluxControlNetInpaintPipeline, FluxControlNetModel, FluxInpaintPipeline
from edits import box_mask, picture
from engines import serving_engine
from fault_kit import file_of, processes, until
from pictures import Pixels, decode
from PIL import Image

from core.config import AdapterConfig, ControlNetConfig, EngineConfig, ModelConfig, StencilConfig
from core.control import Control
from core.errors import InvalidRequestError, ModelNotFoundError, OverloadedError
from core.lora import Lora
from core.sampling_params import SamplingParams
from engine.client.async_engine import AsyncEngine
from engine.client.control_input import ControlInput
from engine.client.edit_types import EditInput
from engine.client.resolve.bound_model import BoundModel
from engine.client.upload import BytesUpload
from entrypoints.workflows.registered import Registered
from entrypoints.workflows.workflow_files import read_sent
from tools.random_checkpoints import make_flux
from tools.random_controlnets import make_flux_controlnet

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "workflows"
SIZE = (256, 192)  # mask-aware steps are good only in pictures of some tokens
SEED = 5


@dataclass(frozen=True)
class Case:
    """A file, and what its workflow is asked for. start: what the model is at the start that has the workflow."""

    file: str
    workflow: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    is_steered: bool = False
    inputs: Mapping[str, float] = field(default_factory=dict)
    players: Mapping[str, str] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()

    @property
    def start(self) -> dict[str, Any]:
        return {"workflow": self.workflow, **self.players}

    def edit(self, **changes: Any) -> EditInput:
        return replace(self._edit(SamplingParams(num_inference_steps=4, seed=SEED, **self.sampling)), **changes)

    def _edit(self, sampling: SamplingParams) -> EditInput:
        image, mask = (BytesUpload(file_of(pixels)) for pixels in (picture(SEED, SIZE), box_mask(SIZE) * 255))
        control = ControlInput(BytesUpload(file_of(lines(SEED, SIZE))), Control(type="canny"))
        return EditInput(
            prompt="a red hat",
            sampling=sampling,
            image=image,
            mask=mask,
            mask_kind="luminance",
            controls=(control,) if self.is_steered else (),
            inputs=dict(self.inputs),
        )


FIGURE7 = Case("figure7", "figure7", {"guidance_scale": 3.5}, is_steered=True, adapters=("style",))
GUARDED = Case("guarded", "guarded", inputs={"most_red": 255.0})
HIRES = Case("hires", "two_passes", {"hires_scale": 2.0, "hires_strength": 0.7})
REFINED = Case(
    "two_loras_refined",
    "two_loras_refined",
    {"refiner_start": 0.6},
    players={"refiner": "polish"},
    adapters=("style", "subject"),
)
CASES = {each.workflow: each for each in (FIGURE7, GUARDED, HIRES, REFINED)}


def asked(case: Case, kind: str) -> EditInput:
    made = {"image": None, "mask": None, "canvas_size": SIZE}
    return case.edit(**(made if kind == "generation" else {}))


def models(folder: Path, *named: tuple[str, tuple[str, ...], Mapping[str, Any]]) -> tuple[ModelConfig, ...]:
    """Of one checkpoint: (name, adapters, settings); and the refiner."""
    common: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "cache_dtype": "float32"}
    union = ControlNetConfig("union", str(folder / "union"), {"canny": 0, "tile": 1})
    polish = ModelConfig(model=str(folder / "polish"), served_model_name="polish", **common)
    return (
        *(
            ModelConfig(
                model=str(folder / "flux"),
                served_model_name=name,
                controlnets=(union,),
                adapters=tuple(AdapterConfig(each, str(folder / f"{each}.safetensors")) for each in adapters),
                **common,
                **settings,
            )
            for name, adapters, settings in named
        ),
        polish,
    )


def config(models: tuple[ModelConfig, ...], num_ranks: int = 1, read: Registered | None = None) -> StencilConfig:
    engine = EngineConfig(
        models=models,
        workers_per_engine=num_ranks,
        classes=read.classes if read else (),
        workflows=read.workflows if read else (),
    )
    return StencilConfig(engine=engine, arena_bytes=2**28)


async def made(engine: AsyncEngine, name: str, edit: EditInput, loras: tuple[Lora, ...] = ()) -> Pixels:
    async with engine.edit(f"{name}-{id(edit)}", edit, engine.choose_model(name, loras)) as outputs:
        *_, data = [bytes(output.data) async for output in outputs]
    return decode(data)[..., :3]


inside = box_mask(SIZE) > 0

Pictures = Mapping[tuple[str, str], Pixels]
"""(workflow, edit or generation) -> its picture."""

KINDS = ("edit", "generation")


async def all_made(engine: AsyncEngine) -> Pictures:
    """In company: of all workflows and kinds at once."""
    keys = [(name, kind) for name in CASES for kind in KINDS]
    pictures = await asyncio.gather(*(made(engine, name, asked(CASES[name], kind)) for name, kind in keys))
    return dict(zip(keys, pictures, strict=True))


def check_same(pictures: Pictures, expected: Pictures) -> None:
    for key, pixels in pictures.items():
        np.testing.assert_array_equal(pixels, expected[key], str(key))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    flux = make_flux(folder / "flux", native_size=256, guidance_embeds=True)
    make_flux(folder / "polish", native_size=256, guidance_embeds=True, seed=3)
    make_flux_controlnet(folder / "union", num_mode=2, guidance_embeds=True)
    make_lora(folder / "style.safetensors", flux)
    make_lora(folder / "subject.safetensors", flux, seed=2)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def read() -> Mapping[str, Registered]:
    """Workflow -> what its file registers; each is read once, since that starts a process."""
    return {case.workflow: await read_sent(EXAMPLES.joinpath(f"{case.file}.py").read_text()) for case in CASES.values()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(folder: Path, read: Mapping[str, Registered]) -> Pictures:
    """Of the same files, given at the start. Two models have an adapter of one name in two servers alone."""
    pictures: dict[tuple[str, str], Pixels] = {}
    for cases in ((FIGURE7, GUARDED, HIRES), (REFINED,)):
        registered = Registered.together([read[case.workflow] for case in cases])
        named = [(case.workflow, case.adapters, case.start) for case in cases]
        async with serving_engine(config(models(folder, *named), read=registered)) as engine:
            for case in cases:
                for kind in KINDS:
                    pictures[case.workflow, kind] = await made(engine, case.workflow, asked(case, kind))
    return pictures


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path, read: Mapping[str, Registered]) -> AsyncIterator[AsyncEngine]:
    """On three ranks: what is expected comes from one."""
    served = models(folder, ("base", ("style", "subject"), {}))
    async with serving_engine(config(served, 3)) as serving:
        for name, case in CASES.items():
            bound = BoundModel("base", dict(case.players))
            await serving.register_workflows(read[name].workflows, read[name].classes, bound)
        yield serving


async def test_pictures_are_those_of_a_start_with_the_same_files(engine: AsyncEngine, expected: Pictures) -> None:
    """One after the other; and they are not those of the model without."""
    assert list(engine.models) == ["base", "polish", "style", "subject", *CASES]
    for (name, kind), pixels in expected.items():
        np.testing.assert_array_equal(await made(engine, name, asked(CASES[name], kind)), pixels, f"{name} {kind}")
    plain = await made(engine, "base", replace(asked(GUARDED, "edit"), inputs={}))
    np.testing.assert_array_equal(plain, expected["guarded", "edit"])
    for name in ("figure7", "two_passes", "two_loras_refined"):
        assert (expected[name, "edit"] != plain).any()


async def test_figure_7_is_the_picture_of_diffusers(folder: Path, expected: Pictures) -> None:
    flux = FluxInpaintPipeline.from_pretrained(folder / "flux")
    parts = {name: part for name, part in flux.components.items() if name not in ("image_encoder", "feature_extractor")}
    net = FluxControlNetModel.from_pretrained(folder / "union")
    pipeline = FluxControlNetInpaintPipeline(**parts, controlnet=net)
    pipeline.load_lora_weights(str(folder / "style.safetensors"))
    pipeline.set_progress_bar_config(disable=True)
    (theirs,) = pipeline(
        prompt="a red hat",
        image=Image.new("RGB", SIZE, (128, 128, 128)),
        mask_image=Image.new("L", SIZE, 255),
        width=SIZE[0],
        height=SIZE[1],
        num_inference_steps=4,
        strength=1.0,
        guidance_scale=3.5,
        max_sequence_length=16,
        control_image=[Image.fromarray(lines(SEED, SIZE))],
        control_mode=0,
        controlnet_conditioning_scale=[1.0],
        control_guidance_start=[0.0],
        control_guidance_end=[1.0],
        generator=torch.Generator("cpu").manual_seed(SEED),
    ).images
    assert np.abs(expected["figure7", "generation"].astype(int) - np.asarray(theirs)).max() <= 2


async def test_company_changes_no_bit(engine: AsyncEngine, expected: Pictures) -> None:
    check_same(await all_made(engine), expected)


async def test_deaths_change_no_bit(engine: AsyncEngine, expected: Pictures) -> None:
    """Of a worker, and then of the engine, while requests run: what starts again has the workflows again."""
    for kind in ("worker", "engine"):
        running = asyncio.create_task(all_made(engine))
        await until(lambda: engine.num_requests_running > 0)
        (dead := processes(kind)[-1]).kill()
        check_same(await asyncio.wait_for(running, 120), expected)
        assert not psutil.pid_exists(dead.pid) or dead not in processes(kind)
    check_same(await all_made(engine), expected)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mine() -> tuple[Registered, Registered]:
    """The file of `guarded` as `mine`, with limits of its own: all pictures pass the first, and none the second."""
    text = EXAMPLES.joinpath("guarded.py").read_text().replace('name="guarded"', 'name="mine"')
    texts = [text.replace('workflow.add_input("most_red", float)', limit) for limit in ("255.0", "-255.0")]
    fine, bad = [await read_sent(each) for each in texts]
    return fine, bad


async def test_running_requests_end_on_the_workflow_that_they_began(
    engine: AsyncEngine, mine: tuple[Registered, Registered]
) -> None:
    """Also when it is deleted; nothing is left of it then."""
    before = dict(engine.services.served.workflows)
    edit = replace(GUARDED.edit(), inputs={}, sampling=SamplingParams(num_inference_steps=80, seed=SEED))
    plain, (fine, bad) = await made(engine, "base", edit), mine
    await engine.register_workflows(fine.workflows, fine.classes)
    first = asyncio.create_task(made(engine, "mine", replace(edit)))
    await until(lambda: engine.num_requests_running == 1)
    await engine.register_workflows(bad.workflows, bad.classes)
    second = asyncio.create_task(made(engine, "mine", replace(edit)))
    await until(lambda: engine.num_admitted == 2)
    engine.remove_workflow("mine")
    with pytest.raises(ModelNotFoundError):
        engine.choose_model("mine")
    assert not first.done()
    assert not second.done()
    np.testing.assert_array_equal(await first, plain)
    assert not (await second)[inside].any()
    await until(lambda: dict(engine.services.served.workflows) == before)
    await until(lambda: engine.services.arena.used_bytes == 0)


async def test_a_choice_whose_workflow_is_gone_is_refused(
    engine: AsyncEngine, mine: tuple[Registered, Registered]
) -> None:
    """The time between is short: a request has been read, and its session has not begun."""
    fine, bad = mine
    await engine.register_workflows(fine.workflows, fine.classes)
    choice = engine.choose_model("mine")
    await engine.register_workflows(bad.workflows, bad.classes)
    edit = replace(GUARDED.edit(), inputs={})
    with pytest.raises(OverloadedError, match="'mine' was replaced meanwhile"):
        async with engine.edit("replaced", edit, choice):
            pass
    engine.remove_workflow("mine")
    with pytest.raises(ModelNotFoundError):
        async with engine.edit("deleted", edit, choice):
            pass


@pytest.mark.parametrize("case", [GUARDED, replace(GUARDED, is_steered=True)], ids=["plain", "steered"])
async def test_no_image_slips_past_a_class(engine: AsyncEngine, case: Case) -> None:
    """No partial one, none of several, nor where the workflow's variant with a ControlNet makes it."""
    edit = replace(case, sampling={"n": 2}).edit(inputs={"most_red": -255.0}, partial_images=2)
    async with engine.edit(f"black {case.is_steered}", edit, engine.choose_model("guarded")) as outputs:
        files = [bytes(output.data) async for output in outputs]
    assert len(files) == 6
    for data in files:
        assert not decode(data)[..., :3][inside].any()


async def test_a_workflow_waits_for_its_adapter(engine: AsyncEngine, folder: Path, expected: Pictures) -> None:
    """The workflow is to blame, and not the adapters of a request that names none. Its name stands for its model where
    the adapter is loaded again."""
    engine.unload_adapter("style")
    with pytest.raises(InvalidRequestError, match="its workflow figure7 has the adapter 'style', which was") as caught:
        engine.choose_model("figure7")
    assert caught.value.param == "model"
    info = await engine.load_adapter("style", str(folder / "style.safetensors"), "figure7")
    assert info.parent == "base"
    pixels = await made(engine, "figure7", asked(FIGURE7, "edit"))
    np.testing.assert_array_equal(pixels, expected["figure7", "edit"])
