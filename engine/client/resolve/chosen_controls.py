"""Which ControlNets steer an edit, and how: checked before anything is read of its control pictures."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from core.control import MAX_CONTROLS, Control
from core.control_type import ControlType
from core.errors import InvalidRequestError
from core.model_info import ModelInfo
from core.validation import check_choice
from engine.client.edit_types import EditInput


class ChosenControls(NamedTuple):
    """One of each for every control picture."""

    controls: tuple[Control, ...] = ()  # with type and scale
    types: tuple[ControlType, ...] = ()

    @property
    def nets(self) -> tuple[str, ...]:
        """Names of their ControlNets, in alphabetical order."""
        return tuple(sorted({each.net for each in self.types}))


NO_CONTROLS = ChosenControls()


def chosen_controls(edit: EditInput, model: ModelInfo) -> ChosenControls:
    """What an edit's control pictures ask for. Raises InvalidRequestError if the model cannot do that."""
    if not edit.controls:
        return NO_CONTROLS
    if not model.controls:
        remedy = "leave it out; GET /v1/models lists the control types of each model"
        raise _invalid(f"{model.name} has no ControlNet; {remedy}")
    if (number := len(edit.controls)) > MAX_CONTROLS:
        raise _invalid(f"there are {number} pictures, and there may be {MAX_CONTROLS}")
    if edit.sampling.own_page_steps:
        raise _invalid("own_page_steps is given too; leave one of the two out")
    if edit.references:
        raise _invalid("reference pictures are given too; leave one of the two out")
    controls = tuple(_resolved(each.control, edit, model) for each in edit.controls)
    types = tuple(model.controls[each.type] for each in controls)
    if any(each.is_joint for each in types) and len({each.net for each in types}) > 1:
        names = " and ".join(f"'{each.type}'" for each in controls)
        message = f"Invalid 'control_type': {names} are of ControlNets of which one goes with no other; give one."
        raise InvalidRequestError(message, param="control_type")
    return ChosenControls(controls, types)


def _resolved(control: Control, edit: EditInput, model: ModelInfo) -> Control:
    """With type and scale."""
    if not control.type and len(model.controls) > 1:
        known = ", ".join(f"'{name}'" for name in model.controls)
        message = f"Missing required parameter: 'control_type'. '{model.name}' has {known}."
        raise InvalidRequestError(message, param="control_type", code="missing_required_parameter")
    name = control.type or next(iter(model.controls))
    check_choice("control_type", name, list(model.controls))
    is_edit = edit.image is not None or edit.template_id is not None or edit.mask is not None
    usual = model.edit_control_scale if is_edit else 1.0
    return msgspec.structs.replace(control, type=name, scale=usual if control.scale is None else control.scale)


def _invalid(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid 'control_image': {why}.", param="control_image")
