"""An ImageEngine with users' classes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image
from run_workflows import CLASSES, DIAMOND, GUARDED, random_inputs, random_workflow
from user_classes import alone, same

from core.config import ModelConfig
from core.errors import ConfigError, InvalidRequestError, WorkflowError
from core.run_class import RunClass
from core.sampling_params import SamplingParams
from entrypoints import Edit, ImageEngine


def test_an_offline_engine_runs_workflows(tiny_checkpoint: Path) -> None:
    random = Random(2)
    workflows = [random_workflow(random, f"w{index}", 1 + index) for index in range(8)]
    asked = [(workflow, random_inputs(random)) for workflow in workflows]
    with ImageEngine(str(tiny_checkpoint), threads=1, classes=CLASSES, workflows=workflows) as engine:
        for workflow, inputs in asked:
            (result,) = engine.generate([inputs], model=workflow.name, use_tqdm=False)
            expected = alone(workflow, inputs)
            assert result.error is None
            assert all(same(result.values[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def inspecting(tiny_checkpoint: Path) -> Iterator[ImageEngine]:
    file = Path(__file__).resolve().parents[1] / "workflow_files" / "inspecting.py"
    with ImageEngine(str(tiny_checkpoint), threads=1, workflows=file) as engine:
        yield engine


PHOTO = np.random.default_rng(1).integers(0, 256, (24, 32, 3), np.uint8)


def test_a_picture_may_be_whatever_pictures_are_and_comes_back_as_one(inspecting: ImageEngine, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    Image.fromarray(PHOTO).save(path)
    given: list[Any] = [PHOTO, Image.fromarray(PHOTO), path, str(path), path.read_bytes()]
    results = inspecting.generate([{"image": each, "count": 1} for each in given], model="inspect", use_tqdm=False)
    for result in results:
        assert result.error is None
        assert result.values["count"] == 2
        np.testing.assert_array_equal(result.values["picture"], PHOTO)
        assert [image.size for image in result.images] == [(32, 24), (1, 1)], "picture is the first"
        np.testing.assert_array_equal(np.asarray(result.images[0]), PHOTO)


@pytest.mark.parametrize(
    ("model", "asked", "params", "param", "told"),
    [
        ("inspect", {"image": PHOTO}, {}, "count", "Missing input 'count' of workflow 'inspect'; give one: integer"),
        ("inspect", {"count": 1, "who": 1}, {}, "who", "no such input; it takes image, count, strength, flip, words"),
        ("inspect", {"image": PHOTO, "count": "1"}, {}, "count", "it is a str, and integer is declared"),
        ("inspect", {"image": 1, "count": 1}, {}, "image", "Give an RGB, RGBA or L image, or a uint8 array"),
        ("inspect", {"image": "none.png", "count": 1}, {}, "image", "Cannot read 'none.png': No such file"),
        ("inspect", {"image": PHOTO, "count": 1, "style": b"none"}, {}, "style", "Invalid 'style': not a readable PNG"),
        ("inspect", {"image": PHOTO, "count": 1}, {"seed": 1}, "seed", "takes inputs of its own alone; leave it out"),
        ("inspect", Edit(prompt="a hat"), {}, "edits", "instead of an Edit give its inputs, a dict by name"),
        ("", {"image": PHOTO}, {}, "edits", "flux' is a model; give it an Edit, with inputs of"),
        ("none", {"image": PHOTO}, {}, "model", "The model 'none' does not exist"),
        ("", Edit(prompt="a hat", inputs={"x": 1}), {}, "x", "the model's workflow has no inputs; leave it out"),
    ],
)
def test_what_is_given_wrongly_is_an_error_that_says_what_to_give(
    inspecting: ImageEngine, model: str, asked: Any, params: dict[str, Any], param: str, told: str
) -> None:
    (result,) = inspecting.generate([asked], SamplingParams(**params), model=model, use_tqdm=False)
    assert isinstance(result.error, InvalidRequestError)
    assert result.error.param == param
    assert re.search(told, str(result.error))


def test_priority_and_timeout_are_a_workflows_too(inspecting: ImageEngine) -> None:
    asked = {"image": PHOTO, "count": 1}
    (result,) = inspecting.generate([asked], SamplingParams(priority=1, timeout=60), model="inspect", use_tqdm=False)
    assert result.error is None
    with pytest.raises(InvalidRequestError, match=r"edits\[0\]"):
        inspecting.generate([1], model="inspect")  # type: ignore[list-item]


def test_edits_give_inputs_to_classes_and_get_what_they_make(tiny_checkpoint: Path) -> None:
    common: dict[str, Any] = {"model": str(tiny_checkpoint), "dtype": "float32", "threads": 1}
    models = [ModelConfig(served_model_name=name, workflow=name, **common) for name in ("inpaint", "guarded")]
    edits = [
        Edit(prompt="a bad hat", size=(64, 64), model=model, inputs=inputs)
        for model, inputs in (("inpaint", {}), ("guarded", {"strictness": 0.0}), ("guarded", {}))
    ]
    sampling = SamplingParams(seed=1, num_inference_steps=1)
    with ImageEngine(models=models, classes=CLASSES, workflows=(GUARDED,)) as engine:
        plain, passed, black = engine.generate(edits, sampling, use_tqdm=False)
        stamp = np.random.default_rng(1).integers(0, 256, (16, 16, 3), np.uint8)
        given: list[dict[str, Any]] = [{"stamp": Image.fromarray(stamp)}, {"x": 1}, {"prompt": "a cap"}]
        stamped, *wrong = engine.generate(
            [Edit(prompt="a hat", size=(64, 64), inputs=each) for each in given],
            sampling,
            model="guarded",
            use_tqdm=False,
        )
    assert np.array_equal(plain.images[0], passed.images[0])
    assert not np.asarray(black.images[0]).any()
    assert [each.reports[0].values["is_bad"] for each in (passed, black)] == [False, True]
    assert [each.values for each in (plain, black)] == [{}, black.reports[0].values]
    np.testing.assert_array_equal(np.asarray(stamped.images[0])[24:40, 24:40], stamp)
    for name, result in zip(("x", "prompt"), wrong, strict=True):
        told = f"Invalid '{name}': workflow 'guarded' has no such input; it takes strictness, stamp."
        assert str(result.error) == told
    with pytest.raises(ConfigError, match="workflow: there is no guarded; there are inpaint, hires"):
        ImageEngine(models=models)


def test_a_class_that_cannot_be_imported_keeps_the_engine_from_starting(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="classes: blur: path no_such_module:Blur: ModuleNotFoundError"):
        ImageEngine(str(tiny_checkpoint), threads=1, classes=(RunClass(name="blur", path="no_such_module:Blur"),))


def test_a_workflow_that_cannot_run_keeps_the_engine_from_starting(tiny_checkpoint: Path) -> None:
    with pytest.raises(WorkflowError, match="diamond, node top: its role mixer is played by no class: there are none"):
        ImageEngine(str(tiny_checkpoint), threads=1, workflows=(DIAMOND,))
