"""What the recipes of docs/architecture.md promise: a step that is forgotten fails a test."""

from __future__ import annotations

import ast
import inspect
import json
import math
from importlib import import_module
from pathlib import Path

import pytest
from fakes import MODEL

from benchmarks.compare.checkpoints import MAKERS
from core import errors
from core.failure import Failure
from core.graph import workflows
from core.graph.catalog import WORKFLOWS
from core.model_choice import ModelChoice
from core.sampling_params import (
    MAX_GUIDANCE,
    MAX_HIRES_SCALE,
    MAX_IMAGES,
    MAX_INFERENCE_STEPS,
    MAX_MASK_MARGIN,
    MAX_PRIORITY,
    MAX_REFINER_START,
    MAX_SEED,
    MAX_SEQUENCE_LENGTH,
    MAX_SHIFT,
    MAX_TIMEOUT,
    MIN_HIRES_SCALE,
    MIN_REFINER_START,
    MIN_SHIFT,
    MIN_TIMEOUT,
    SamplingParams,
)
from entrypoints.openai.body.submission import Submission
from entrypoints.openai.edit_request import build_call
from entrypoints.openai.fields.field import Field, Value
from entrypoints.openai.fields.fields import EDIT_FIELDS
from model_executor.models.registry import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "engine", "model_executor", "entrypoints")

NOT_FIELDS = {"computed_steps", "own_page_steps", "sigmas"}
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


RANGES: dict[str, tuple[float, float]] = {
    "num_inference_steps": (1, MAX_INFERENCE_STEPS),
    "guidance_scale": (0, MAX_GUIDANCE),
    "true_cfg_scale": (0, MAX_GUIDANCE),
    "shift": (MIN_SHIFT, MAX_SHIFT),
    "seed": (-1, MAX_SEED),  # -1: drawn at random
    "n": (1, MAX_IMAGES),
    "strength": (0, 1),
    "max_sequence_length": (1, MAX_SEQUENCE_LENGTH),
    "hires_scale": (MIN_HIRES_SCALE, MAX_HIRES_SCALE),
    "hires_strength": (0, 1),
    "refiner_start": (MIN_REFINER_START, MAX_REFINER_START),
    "mask_margin": (0, MAX_MASK_MARGIN),
    "full_steps": (0, MAX_INFERENCE_STEPS),
    "steps_without_lora": (0, MAX_INFERENCE_STEPS),
    "priority": (-MAX_PRIORITY, MAX_PRIORITY),
    "timeout": (MIN_TIMEOUT, MAX_TIMEOUT),
}
"""The least and the greatest value of every number."""


def test_every_number_has_a_range() -> None:
    assert {*RANGES} == {name for name in SAMPLED if EDIT_FIELDS[name].kind in ("integer", "number")}


def beyond(field: Field, bound: float, direction: int) -> float:
    """The value next to a bound on its upper (1) or lower (-1) side."""
    return int(bound) + direction if field.kind == "integer" else math.nextafter(bound, direction * math.inf)


def send(name: str, value: float) -> None:
    """Read a value as a form's text and make the call. Raises InvalidRequestError."""
    values = {"prompt": "a hat", "template_id": "t", name: EDIT_FIELDS[name].from_text(repr(value))}
    build_call("image_edit", Submission(values=values), ModelChoice(MODEL))


@pytest.mark.parametrize("name", RANGES)
def test_a_number_is_taken_within_its_range_alone(name: str) -> None:
    low, high = RANGES[name]
    send(name, low)
    send(name, high)
    for outside in (beyond(EDIT_FIELDS[name], low, -1), beyond(EDIT_FIELDS[name], high, 1)):
        with pytest.raises(errors.InvalidRequestError):
            send(name, outside)


def test_every_sampling_parameter_is_a_field() -> None:
    assert {*SamplingParams.__struct_fields__} - NOT_FIELDS == {*SAMPLED}


# ------------------------------------------------------------------------------------------------ an op, a family


def test_every_workflow_has_a_file_or_is_made_of_one_that_has() -> None:
    files = {path.stem for path in Path(workflows.__path__[0]).glob("[!_]*.py")}
    assert {name for name in WORKFLOWS if not name.startswith(("controlled_", "selected_", "recalled_"))} == files
    for name in files:
        assert getattr(import_module(f"{workflows.__name__}.{name}"), name.upper()) is WORKFLOWS[name]


def test_numbers_of_workflows_are_sampling_parameters() -> None:
    for workflow in WORKFLOWS.values():
        numbers = [each for region in workflow.regions for each in (region.strength, region.begin, region.end)]
        numbers += [*workflow.canvases.values(), *(port.name for port in workflow.inputs if port.type == "number")]
        assert {each for each in numbers if isinstance(each, str)} <= {*SamplingParams.__struct_fields__}


def test_only_a_workflows_own_file_asks_for_its_name() -> None:
    """Whatever else differs between workflows follows from their data."""
    names = {each for name in WORKFLOWS for each in (name, name.upper())}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for compared in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Compare)):
            asked = {getattr(node, "id", getattr(node, "value", None)) for node in ast.walk(compared)} & names
            assert not asked, f"{path.relative_to(ROOT)}:{compared.lineno} asks for {asked}"


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


OURS = [kind for kind in errors.EngineError.__subclasses__() if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", [kind for kind in OURS if kind is not errors.MessageError])
def test_an_engines_error_is_raised_where_the_result_is_awaited(kind: type[errors.StencilError]) -> None:
    """A MessageError is an EngineError there: which message it was is only logged."""
    assert type(Failure.of(kind("it broke")).to_error()) is kind
