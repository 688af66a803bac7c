"""An ImageEngine with users' classes."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from run_workflows import CLASSES, DIAMOND, random_inputs, random_workflow
from user_classes import alone, same

from core.errors import ConfigError, InvalidRequestError, WorkflowError
from core.run_class import RunClass
from engine.client.run_input import RunInput
from entrypoints import ImageEngine


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


def test_a_class_that_cannot_be_imported_keeps_the_engine_from_starting(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="classes: blur: path no_such_module:Blur: ModuleNotFoundError"):
        ImageEngine(str(tiny_checkpoint), threads=1, classes=(RunClass(name="blur", path="no_such_module:Blur"),))


def test_a_workflow_that_cannot_run_keeps_the_engine_from_starting(tiny_checkpoint: Path) -> None:
    with pytest.raises(WorkflowError, match="diamond, node top: its role mixer is played by no class: there are none"):
        ImageEngine(str(tiny_checkpoint), threads=1, workflows=(DIAMOND,))
