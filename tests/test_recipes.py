"""What the recipes of docs/architecture.md promise: a step that is forgotten fails a test."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import pytest
from fakes import MODEL

import core.graph.workflow as workflow_module
from benchmarks.compare.checkpoints import MAKERS
from core import errors
from core.failure import Failure
from core.graph.catalog import WORKFLOWS
from core.graph.workflow import Workflow
from core.model_choice import ModelChoice
from core.sampling_params import SamplingParams
from entrypoints.openai.body.submission import Submission
from entrypoints.openai.edit_request import build_call
from entrypoints.openai.fields.field import Field, Value
from entrypoints.openai.fields.fields import EDIT_FIELDS
from model_executor.models.registry import FAMILIES

NOT_FIELDS = {"computed_steps", "own_page_steps"}
"""Sampling parameters of offline edits alone."""

SAMPLED = sorted(EDIT_FIELDS.keys() & {*SamplingParams.__struct_fields__})
PLAIN = SamplingParams()


def other_value(field: Field) -> Value:
    """A valid value that is not the default."""
    match field.kind:
        case "string":
            return next((choice for choice in field.choices if choice != "full"), "a hat")
        case "boolean":
            return not getattr(PLAIN, field.name)
        case "integer":
            return int(field.high or 3)
        case "number":
            default = getattr(PLAIN, field.name)
            return next(value for value in (field.low, field.high, 7.5) if value is not None and value != default)


# ------------------------------------------------------------------------------------------------------- a field


@pytest.mark.parametrize("name", SAMPLED)
def test_a_field_reaches_the_engine(name: str) -> None:
    value = other_value(EDIT_FIELDS[name])
    submission = Submission(values={"prompt": "a hat", "template_id": "t", name: value})
    call = build_call("image_edit", submission, ModelChoice(MODEL))
    assert getattr(call.edit.sampling, name) == value != getattr(PLAIN, name)


def test_every_sampling_parameter_is_a_field() -> None:
    assert {*SamplingParams.__struct_fields__} - NOT_FIELDS == {*SAMPLED}


# ------------------------------------------------------------------------------------------------ an op, a family


def test_every_workflow_is_in_the_catalog() -> None:
    written = [value for value in vars(workflow_module).values() if isinstance(value, Workflow)]
    assert {workflow.name for workflow in written} == {*WORKFLOWS}


def test_every_family_has_a_small_checkpoint(tmp_path: Path) -> None:
    """Which puts it under the tests that take all families from MAKERS."""
    paths = [make(tmp_path / name) for name, make in MAKERS.items()]
    made = {json.loads((path / "model_index.json").read_text())["_class_name"] for path in paths}
    assert {FAMILIES[name].family for name in made} == {family.family for family in FAMILIES.values()}


# ------------------------------------------------------------------------------------------------------ an error


def test_the_tree_of_errors_names_every_class() -> None:
    assert errors.__doc__ is not None
    classes = [node.name for node in ast.parse(inspect.getsource(errors)).body if isinstance(node, ast.ClassDef)]
    assert not [name for name in classes if f" {name} " not in errors.__doc__.replace("\n", " \n")]


KINDS = [kind for kind in errors.EngineError.__subclasses__() if kind is not errors.MessageError]


@pytest.mark.parametrize("kind", KINDS)
def test_an_engines_error_is_raised_where_the_result_is_awaited(kind: type[errors.StencilError]) -> None:
    """A MessageError is an EngineError there: which message it was is only logged."""
    assert type(Failure.of(kind("it broke")).to_error()) is kind
