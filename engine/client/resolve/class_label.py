"""Which class an edit asks a picture of, in models that make pictures of classes; and what these cannot do."""

from __future__ import annotations

from core.errors import InvalidRequestError
from core.model_info import ModelInfo
from core.validation import check_integer, shorten
from engine.client.edit_types import EditInput


def chosen_class(edit: EditInput, model: ModelInfo) -> int | None:
    """The class, 0 .. num_classes - 1; None for a model that takes prompts. Without `class_label` the prompt is the
    name of a class. Raises InvalidRequestError, also for what models with classes cannot do: edits, and sizes other
    than their own."""
    if not model.num_classes:
        if edit.class_label is not None:
            why = f"'{model.name}' makes pictures of a prompt; leave 'class_label' out"
            raise InvalidRequestError(f"Invalid 'class_label': {why}.", param="class_label")
        return None
    _check_generation(edit, model)
    wanted = edit.prompt if edit.class_label is None else edit.class_label
    if isinstance(wanted, str):
        return _named(wanted, model)
    check_integer("class_label", wanted, 0, model.num_classes - 1)
    return wanted


def _named(name: str, model: ModelInfo) -> int:
    label = model.class_names.get(name)
    if label is not None:
        return label
    numbers = f"a number from 0 to {model.num_classes - 1}"
    remedy = f"{numbers}, or a name of GET /v1/models" if model.class_names else f"{numbers}: its classes have no names"
    if not name:
        message = f"Missing required parameter: 'class_label'. '{model.name}' makes pictures of a class; give {remedy}."
        raise InvalidRequestError(message, param="class_label", code="missing_required_parameter")
    message = f"Invalid 'class_label': '{model.name}' has no class named '{shorten(name)}'. Give {remedy}."
    raise InvalidRequestError(message, param="class_label")


def _check_generation(edit: EditInput, model: ModelInfo) -> None:
    """Raises InvalidRequestError unless it is a generation of the model's own size, or that enlarged or reduced."""
    given = {"image": edit.image, "template_id": edit.template_id, "mask": edit.mask}
    for name, value in given.items():
        if value is not None:
            raise edits_nothing(model, name)
    if edit.sampling.hires_scale is not None:
        raise _one_size(model, "hires_scale", "leave it out")
    if edit.canvas_size is not None and edit.canvas_size[0] != edit.canvas_size[1]:
        raise _one_size(model, "size", "give 'auto' or a square, to which the picture is resized")


def edits_nothing(model: ModelInfo, param: str) -> InvalidRequestError:
    """The error for a picture to edit, or to register as a template."""
    why = f"'{model.name}' makes pictures of a class, and edits none: use /v1/images/generations, or another model"
    return InvalidRequestError(f"Invalid '{param}': {why}.", param=param)


def _one_size(model: ModelInfo, param: str, remedy: str) -> InvalidRequestError:
    why = f"'{model.name}' makes pictures of {model.native_size}x{model.native_size} pixels; {remedy}"
    return InvalidRequestError(f"Invalid '{param}': {why}.", param=param)
