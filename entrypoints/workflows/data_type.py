"""Data types: how models and workflows say what their values are."""

from __future__ import annotations

from typing import Any

from core.errors import WorkflowError
from core.graph.form import INTEGER, NUMBER, TRUTH, Form, picture, text

Image = picture(2048, 2048)
"""A picture of up to 2048 x 2048 px."""

_FORMS: dict[Any, Form] = {bool: TRUTH, int: INTEGER, float: NUMBER, str: text(4096)}
"""Python's types -> what they stand for; a str has up to 4096 bytes."""


def form_of(data_type: object, node: str, name: str) -> Form:
    """What a data type stands for: bool, int, float, str, Image, or what picture, tensor and text return. Raises
    WorkflowError at this node and input.
    """
    if isinstance(data_type, Form):
        if problem := _problem_of_types(data_type):
            raise WorkflowError(f"{node}, {name}: {problem}", node=node, input=name)
        return data_type
    found = _FORMS.get(data_type) if isinstance(data_type, type) else None
    if found is None:
        problem = (
            f"{data_type!r} says no size; give bool, int, float, str, Image, picture(...), tensor(...) or text(...)"
        )
        raise WorkflowError(f"{node}, {name}: {problem}", node=node, input=name)
    return found


def _problem_of_types(form: Form) -> str:
    """Why a form cannot be told to the server, which checks what it says; "": it can."""
    if not isinstance(form.dtype, str):
        return f"its dtype is {form.dtype!r:.80}; give a name, such as 'float32'"
    if not all(type(side) is int for side in form.shape):
        return f"its sides are {list(form.shape)!r:.80}; give whole numbers"
    return ""
