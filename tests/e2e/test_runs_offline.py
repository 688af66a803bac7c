"""An ImageEngine with users' classes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from run_workflows import CLASSES, DIAMOND, GUARDED, random_inputs, random_workflow
from user_classes import alone, same

from core.config import ModelConfig
from core.errors import ConfigError, InvalidRequestError, WorkflowError
from core.run_class import RunClass
from core.sampling_params import SamplingParams
from engine.client.run_input import RunInput
from entrypoints import Edit, ImageEngine


def test_an_offline_engine_runs_workflows(tiny_checkpoint: Path) -> None:
    random = Random(2)
    workflows = [random_workflow(random, f"w{index}", 1 + index) for index in range(8)]
    asked = [(workflow, random_inputs(random)) for workflow in workflows]
    runs = [RunInput(workflow=workflow.name, inputs=inputs) for workflow, inputs in asked]
    with ImageEngine(str(tiny_checkpoint), threads=1, classes=CLASSES, workflows=workflows) as engine:
        *results, wrong = engine.run([*runs, RunInput(workflow="none")])
    for (workflow, inputs), result in zip(asked, results, strict=True):
        expected = alone(workflow, inputs)
        assert result.error is None
        assert all(same(result.values[name], expected[name]) for name in expected)
    assert isinstance(wrong.error, InvalidRequestError)


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
        (wrong,) = engine.generate([replace(edits[0], inputs={"x": 1})], sampling, use_tqdm=False)
    assert np.array_equal(plain.images[0], passed.images[0])
    assert not np.asarray(black.images[0]).any()
    assert [each.reports[0].values["is_bad"] for each in (passed, black)] == [False, True]
    assert isinstance(wrong.error, InvalidRequestError)
    with pytest.raises(ConfigError, match="workflow: there is no guarded; there are inpaint, hires"):
        ImageEngine(models=models)


def test_a_class_that_cannot_be_imported_keeps_the_engine_from_starting(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="classes: blur: path no_such_module:Blur: ModuleNotFoundError"):
        ImageEngine(str(tiny_checkpoint), threads=1, classes=(RunClass(name="blur", path="no_such_module:Blur"),))


def test_a_workflow_that_cannot_run_keeps_the_engine_from_starting(tiny_checkpoint: Path) -> None:
    with pytest.raises(WorkflowError, match="diamond, node top: its role mixer is played by no class: there are none"):
        ImageEngine(str(tiny_checkpoint), threads=1, workflows=(DIAMOND,))
