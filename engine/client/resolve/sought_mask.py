"""Checks what an edit says of a mask that is to be found, before anything is read of its picture."""

from __future__ import annotations

from core.errors import InvalidRequestError
from core.mask_request import MaskRequest
from core.model_info import ModelInfo
from core.selection import SelectionKind
from engine.client.edit_types import EditInput

FIELDS: dict[SelectionKind, str] = {"words": "mask_prompt", "points": "mask_points", "box": "mask_box"}
"""Way to ask for a mask -> the field of a request."""


def check_sought_mask(edit: EditInput, model: ModelInfo) -> None:
    """Raises InvalidRequestError for a mask that cannot be found, and for what excludes one that can."""
    if edit.mask_request is None:
        if edit.makes_mask:
            message = "Missing required parameter: 'mask_prompt'; or give 'mask_points' or 'mask_box'."
            raise InvalidRequestError(message, param="mask_prompt", code="missing_required_parameter")
        return
    asked = _fields(edit.mask_request)
    if edit.image is None and edit.template_id is None:
        raise _invalid(asked[0], "there is no picture to find it in; give 'image'")
    if edit.mask is not None:
        raise _invalid(asked[0], "a mask is given too; leave one of them out")
    if edit.padding_mask_crop is not None:
        remedy = "get the mask first (POST /v1/images/masks), and give it as 'mask'"
        raise _invalid("padding_mask_crop", f"the crop is made before a mask is found; {remedy}")
    if not model.selects_by:
        remedy = "give a mask, or have the server started with --segmenter"
        raise _invalid(asked[0], f"{model.name} has no model that finds masks; {remedy}")
    known = [FIELDS[kind] for kind in model.selects_by]
    if unknown := [name for name in asked if name not in known]:
        raise _invalid(unknown[0], f"the model that finds masks for {model.name} takes {' and '.join(known)} alone")


def _fields(request: MaskRequest) -> list[str]:
    """The fields that it was made of."""
    given = {"words": request.prompt is not None, "points": bool(request.points), "box": request.box is not None}
    return [name for kind, name in FIELDS.items() if given[kind]]


def _invalid(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid '{name}': {why}.", param=name)
