"""Which workflow serves a request, and how many rounds its regions have."""

from __future__ import annotations

from collections.abc import Mapping, Set

from core.errors import InvalidRequestError
from core.graph.catalog import NAMED, WORKFLOWS
from core.graph.controlling import CONTROLS, controlled_name
from core.graph.selecting import selected_name
from core.graph.workflow import Workflow
from core.model_info import ModelInfo
from core.run_class import RUN_CLASS
from core.sampling_params import SamplingParams

TEMPLATE = "template"
"""The input of workflows that is a request's picture."""

CONTROL_PARAM = "control_image"
"""The parameter of requests by which they give the pictures that ControlNets see."""

PARAMS = {CONTROLS.name: CONTROL_PARAM, TEMPLATE: "image"}
"""Input of a workflow -> the parameter of requests, where that is called otherwise."""


def chosen_workflow(
    model: ModelInfo,
    sampling: SamplingParams,
    class_label: int | None,
    *,
    finds_mask: bool = False,
    is_controlled: bool = False,
    is_edit: bool = False,
    workflows: Mapping[str, Workflow] = WORKFLOWS,
) -> Workflow:
    """The first workflow of the catalog that takes all that the request gives, and whose roles the model has. sampling:
    resolved. finds_mask: whether its mask is to be found. is_controlled: whether ControlNets steer it. is_edit: whether
    it gives a picture. workflows: that engines run, by name. Raises InvalidRequestError if there is none: a parameter
    excludes another one, or is missing.
    """
    pictures = ({CONTROLS.name} if is_controlled else set[str]()) | ({TEMPLATE} if is_edit else set[str]())
    chosen = _first_able(model, sampling, class_label, pictures, workflows)
    if is_controlled and CONTROLS.name not in _names_of(chosen):
        chosen = _variant(chosen, workflows, controlled_name(chosen.name), CONTROL_PARAM)
    return _variant(chosen, workflows, selected_name(chosen.name), "mask") if finds_mask else chosen


def _variant(chosen: Workflow, workflows: Mapping[str, Workflow], name: str, param: str) -> Workflow:
    if name not in workflows:
        message = f"Invalid '{param}': workflow '{chosen.title}' takes none, or makes it itself; leave it out."
        raise InvalidRequestError(message, param=param)
    return workflows[name]


def _first_able(
    model: ModelInfo,
    sampling: SamplingParams,
    class_label: int | None,
    pictures: Set[str],
    workflows: Mapping[str, Workflow],
) -> Workflow:
    """pictures: "controls" if ControlNets steer the request, which workflows without them have a variant for, and
    "template" if it gives a picture to edit, which all take.
    """
    served = [workflows[model.workflow]] if model.workflow else [*NAMED]
    able = [workflow for workflow in served if _has_roles(model, workflow)]
    numbers = [name for name in _deciding() if getattr(sampling, name) is not None]
    given = {"prompt" if class_label is None else "class_label", *numbers}
    for workflow in able:
        if given <= _names_of(workflow) and _required(workflow) <= given | pictures:
            return workflow
    lacking = sorted(_required(able[0]) - given - pictures)
    missing = [PARAMS.get(name, name) for name in lacking]
    why = f"'{model.name}' makes no pictures {'with' if numbers else 'without'} it"
    others = f" and {' and '.join(numbers[1:])}" if numbers[1:] else ""
    param = numbers[0] if numbers else missing[0]
    remedy = "leave it out" if numbers else "give it"
    raise InvalidRequestError(f"Invalid '{param}': {why}{others}; {remedy}.", param=param)


def rounds_of(workflow: Workflow, model: ModelInfo, sampling: SamplingParams) -> tuple[int, ...]:
    """Steps of each of a workflow's regions, in order; those of a part of the noise levels are estimated. sampling:
    resolved as to steps."""
    number = sampling.number
    return tuple(
        model.num_steps_of(sampling.with_steps(each.steps), number(each.strength), number(each.begin), number(each.end))
        for each in workflow.regions
    )


def _deciding() -> list[str]:
    """The sampling parameters that workflows take as inputs, so that they decide between them."""
    ports = (port for workflow in WORKFLOWS.values() for port in workflow.inputs)
    return list(dict.fromkeys(port.name for port in ports if port.type == "number"))


def _has_roles(model: ModelInfo, workflow: Workflow) -> bool:
    """Whether a model plays each role: this one, if the role is named as its kind of component. Classes play theirs."""
    return all(role in model.roles or kind in (role, RUN_CLASS) for role, kind in workflow.roles.items())


def _names_of(workflow: Workflow) -> set[str]:
    return {port.name for port in workflow.inputs}


def _required(workflow: Workflow) -> set[str]:
    """Names of the inputs that decide: those that are no fields of requests are checked where they are read."""
    fields = (port for port in workflow.inputs if port.form is None or port.name == "prompt")
    return {port.name for port in fields if not port.is_optional}
