"""DefaultFields: what requests to a model are where they leave fields out, as its workflow says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from core.errors import InvalidRequestError, WorkflowError
from core.graph.workflow import Literal, Workflow
from core.validation import check_filled
from entrypoints.openai.fields.field import Field, Value
from entrypoints.openai.fields.fields import EDIT_FIELDS, QUALITY_FACTORS, check_aspect, parse_size

OF_CONTROLS = ("control_type", "control_scale", "control_start", "control_end")
OF_MASKS = ("mask_grow", "mask_feather")
KNOWN: Mapping[str, Field] = {
    name: EDIT_FIELDS[name]
    for name in (
        *("prompt", "negative_prompt", "size", "seed", "num_inference_steps", "strength", "guidance_scale"),
        *("true_cfg_scale", "shift", "hires_scale", "hires_strength", "refiner_start", "max_sequence_length"),
        *("mask_aware", "approximate_caching"),
        *OF_CONTROLS,
        *OF_MASKS,
    )
}
"""The fields that may have a default."""

MAX_PARSED = 256


def check_defaults(workflow: Workflow) -> None:
    """Raises WorkflowError for defaults that no request could give."""
    if workflow.defaults and not workflow.is_for_pictures:
        problem = "defaults are of requests for pictures; leave set_defaults out"
        raise WorkflowError(f"workflow {workflow.name}: {problem}", node="")
    for name, value in workflow.defaults.items():
        where = f"workflow {workflow.name}, default {name}"
        if name not in KNOWN:
            raise WorkflowError(f"{where}: no default; there are {', '.join(KNOWN)}", node="", input=name)
        try:
            if _parsed(name, value) is None:
                raise WorkflowError(f"{where}: it says nothing; leave it out", node="", input=name)
            if name == "size" and (size := parse_size(str(value))) is not None:
                check_aspect(size)
            if name == "prompt":
                check_filled(name, str(value))
        except InvalidRequestError as error:
            raise WorkflowError(f"{where}: {error}", node="", input=name) from error


def defaults_of(workflow: Workflow | None) -> dict[str, Value]:
    """The defaults of a model's workflow, which were checked."""
    if workflow is None:
        return {}
    parsed = {name: _parsed(name, value) for name, value in workflow.defaults.items()}
    return {name: value for name, value in parsed.items() if value is not None}


@lru_cache(maxsize=MAX_PARSED, typed=True)
def _parsed(name: str, value: Literal) -> Value | None:
    return KNOWN[name].from_text(str(value))


def left_open(
    defaults: Mapping[str, Value], given: Mapping[str, Value], *, is_edit: bool, is_steered: bool, most_tokens: int
) -> dict[str, Value]:
    """Those of the defaults that a request follows. given: what it says; a size or quality "auto", which clients send
    unasked, says nothing. is_edit: it has a picture, whose size its result has. is_steered: it has control pictures.
    most_tokens: of text, that its model takes.
    """
    says_steps = "steps" in given or given.get("quality") in QUALITY_FACTORS
    without = {"size"} if is_edit else set(OF_MASKS)
    without |= set() if is_steered else set(OF_CONTROLS)
    without |= {"num_inference_steps"} if says_steps else set()
    without |= {name for name, value in given.items() if (name, value) != ("size", "auto")}
    found = {name: value for name, value in defaults.items() if name not in without}
    if isinstance(length := found.get("max_sequence_length"), int):
        found["max_sequence_length"] = min(length, most_tokens)
    return found
