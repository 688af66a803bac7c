"""Names of models and of workflows, which requests name in the same field."""

from __future__ import annotations

import pytest
from run_workflows import CLASSES, GUARDED, SLEEPING

import core.scheduling.ops  # noqa: F401  the check of a workflow looks ops up
from core.config import AdapterConfig, EngineConfig, ModelConfig
from core.errors import WorkflowError
from engine.client.resolve.served_models import ServedModels


@pytest.mark.parametrize("names", [("sleeping", "shirt"), ("tiny", "sleeping")])
def test_a_workflow_that_requests_name_has_no_name_of_a_model_or_an_adapter(names: tuple[str, str]) -> None:
    model, adapter = names
    configs = (ModelConfig(served_model_name=model, adapters=(AdapterConfig(adapter, "file"),)),)
    with pytest.raises(WorkflowError, match="workflow sleeping: a model has this name; give it another"):
        ServedModels(EngineConfig(models=configs, classes=CLASSES, workflows=(SLEEPING,)))


def test_a_workflow_of_a_model_may_have_its_name() -> None:
    config = EngineConfig(models=(ModelConfig(served_model_name="guarded"),), classes=CLASSES, workflows=(GUARDED,))
    assert ServedModels(config).run_workflows == {}
