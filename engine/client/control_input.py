"""ControlInput: a picture that steers the steps of an edit, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.control import Control
from core.errors import InvalidRequestError
from engine.client.upload import Upload


@dataclass(frozen=True, slots=True)
class ControlInput:
    """What depends on the model is checked when the edit is run."""

    picture: Upload
    control: Control


def control_inputs(pictures: Sequence[Upload], given: Mapping[str, Sequence[Any]]) -> tuple[ControlInput, ...]:
    """Control pictures with what a request says of them. given: fields of Control, each with a value for every picture,
    or one for all. Raises InvalidRequestError.
    """
    of_each = {name: _for_each(name, values, len(pictures)) for name, values in given.items()}
    return tuple(
        ControlInput(picture, Control(**{name: values[number] for name, values in of_each.items()}))
        for number, picture in enumerate(pictures)
    )


def _for_each(name: str, values: Sequence[Any], number: int) -> Sequence[Any]:
    if len(values) == 1:
        return list(values) * number
    if len(values) != number:
        what = f"{len(values)} values for {number} control pictures; give one for all, or one for each"
        raise InvalidRequestError(f"Invalid 'control_{name}': {what}.", param=f"control_{name}")
    return values
