"""Workflows of the families' models, offline: they make the pictures of the shipped workflows, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from adapters import make_lora
from control_rig import lines
from edits import box_mask, picture
from PIL import Image

from core.config import AdapterConfig, ControlNetConfig, ModelConfig
from core.errors import InvalidRequestError
from core.sampling_params import SamplingParams
from engine.client.edit_types import EditReport
from entrypoints import ControlPicture, Edit, ImageEngine
from tools.random_checkpoints import make_flux
from tools.random_controlnets import make_flux_controlnet

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "workflows"
SIZE = (256, 192)  # mask-aware steps are good only in pictures of some tokens
PARAMS = SamplingParams(num_inference_steps=4, seed=5)
PICTURE, MASK = Image.fromarray(picture(1, SIZE)), Image.fromarray(box_mask(SIZE) * 255)
CONTROLS = [ControlPicture(lines(1, SIZE), type="canny")]
GIVEN: dict[str, dict[str, Any]] = {"generation": {"size": SIZE}, "edit": {"image": PICTURE, "mask_image": MASK}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_lora(folder / "lora.safetensors", make_flux(folder / "flux", native_size=256, guidance_embeds=True))
    make_flux_controlnet(folder / "union", num_mode=2, guidance_embeds=True)
    return folder


@pytest.fixture(scope="module", params=[1, 2])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[ImageEngine]:
    common: dict[str, Any] = {"dtype": "float32", "threads": 1, "cache_dtype": "float32"}
    union = ControlNetConfig("union", str(folder / "union"), {"canny": 0, "tile": 1})
    models = [
        ModelConfig(
            model=str(folder / "flux"),
            served_model_name=name or "plain",
            workflow=name,
            controlnets=(union,),
            adapters=(AdapterConfig(adapter, str(folder / "lora.safetensors")),) if adapter else (),
            **common,
        )
        for name, adapter in (("", "same"), ("figure7", "style"), ("guarded", ""))
    ]
    files = [EXAMPLES / "figure7.py", EXAMPLES / "guarded.py"]
    with ImageEngine(models=models, workflows=files, image_workers=1, workers_per_engine=request.param) as engine:
        yield engine


def made(engine: ImageEngine, model: str, **edit: Any) -> tuple[npt.NDArray[np.uint8], EditReport]:
    (result,) = engine.generate([Edit(prompt="a red hat", model=model, **edit)], PARAMS, use_tqdm=False)
    if result.error:
        raise result.error
    return np.asarray(result.images[0]), result.reports[0]


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_figure_7_makes_what_the_shipped_workflow_makes(engine: ImageEngine, given: dict[str, Any]) -> None:
    plain, report = made(engine, "plain", controls=CONTROLS, lora="same", **given)
    assert (report.exact_reason is None) == ("image" in given), "whether its steps compute the edited tokens alone"
    figure, other = made(engine, "figure7", controls=CONTROLS, **given)
    np.testing.assert_array_equal(figure, plain)
    assert (other.exact_reason, other.num_inference_steps) == (report.exact_reason, report.num_inference_steps)
    for less in ({"lora": "same"}, {"controls": CONTROLS}):
        assert (made(engine, "plain", **less, **given)[0] != plain).any()


def test_a_picture_that_the_workflow_needs_is_asked_for(engine: ImageEngine) -> None:
    with pytest.raises(InvalidRequestError, match="'figure7' makes no pictures without it") as refused:
        made(engine, "figure7", size=SIZE)
    assert refused.value.param == "control_image"


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("controls", [CONTROLS, ()], ids=["steered", "unsteered"])
def test_a_class_blacks_out_what_the_same_steps_have_made(
    engine: ImageEngine, given: dict[str, Any], controls: list[ControlPicture]
) -> None:
    plain, _ = made(engine, "plain", controls=controls, **given)
    passed, report = made(engine, "guarded", inputs={"most_red": 255.0}, controls=controls, **given)
    np.testing.assert_array_equal(passed, plain)
    assert report.values == {"is_safe": True}
    black, report = made(engine, "guarded", inputs={"most_red": -255.0}, controls=controls, **given)
    assert report.values == {"is_safe": False}
    middle = black[SIZE[1] // 3 : -SIZE[1] // 3, SIZE[0] // 3 : -SIZE[0] // 3]
    assert not middle.any()
