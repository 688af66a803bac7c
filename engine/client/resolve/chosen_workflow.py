"""Which workflow serves a request, and how many rounds its regions have."""

from __future__ import annotations

from collections.abc import Iterator

from core.errors import InvalidRequestError
from core.graph.catalog import WORKFLOWS
from core.graph.workflow import Workflow
from core.model_info import ModelInfo
from core.sampling_params import SamplingParams


def chosen_workflow(model: ModelInfo, sampling: SamplingParams, class_label: int | None) -> Workflow:
    """The first workflow of the catalog that takes all that the request gives, and whose roles the model has. sampling:
    resolved. Raises InvalidRequestError if there is none: parameters that exclude each other.
    """
    given = {"prompt" if class_label is None else "class_label", *_given_numbers(sampling)}
    served = [WORKFLOWS[model.workflow]] if model.workflow else list(WORKFLOWS.values())
    able = [workflow for workflow in served if _has_roles(model, workflow)]
    found = next((workflow for workflow in able if _takes(workflow, given)), None)
    if found is None:
        raise _excluded(model, sampling)
    return found


def rounds_of(workflow: Workflow, model: ModelInfo, sampling: SamplingParams) -> tuple[int, ...]:
    """Steps of each of a workflow's regions, in order; those of a part of the noise levels are estimated. sampling:
    resolved as to steps."""
    number = sampling.number
    return tuple(
        model.num_steps_of(sampling, number(each.strength), number(each.begin), number(each.end))
        for each in workflow.regions
    )


def _given_numbers(sampling: SamplingParams) -> Iterator[str]:
    """The sampling parameters that decide between workflows, of those that are set."""
    names = dict.fromkeys(
        each.name for each in (port for w in WORKFLOWS.values() for port in w.inputs) if each.type == "number"
    )
    return (name for name in names if getattr(sampling, name) is not None)


def _has_roles(model: ModelInfo, workflow: Workflow) -> bool:
    """Whether a model plays each role: this one, if the role is named as its kind of component."""
    return all(role in model.roles or role == kind for role, kind in workflow.roles.items())


def _takes(workflow: Workflow, given: set[str]) -> bool:
    required = {port.name for port in workflow.inputs if not port.is_optional}
    return required <= given <= {port.name for port in workflow.inputs}


def _excluded(model: ModelInfo, sampling: SamplingParams) -> InvalidRequestError:
    param, *others = _given_numbers(sampling)
    why = f"'{model.name}' makes no pictures with it" + (f" and {' and '.join(others)}" if others else "")
    return InvalidRequestError(f"Invalid '{param}': {why}; leave it out.", param=param)
