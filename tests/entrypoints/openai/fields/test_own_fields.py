"""Names of workflows' inputs among the fields of requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from run_workflows import DIAMOND, GUARDED, STAMP

from core.graph.form import INTEGER, NUMBER, TRUTH, Form, tensor, text
from core.graph.op import Port
from entrypoints.openai.fields.own_fields import unfit_name


@pytest.mark.parametrize(
    ("name", "form", "is_fit"),
    [
        ("strictness", NUMBER, True),
        ("strength", NUMBER, True),  # the request's own, of one kind
        ("strength", TRUTH, False),
        ("n", INTEGER, True),
        ("lora", text(8), False),  # its values are no texts
        ("seed", tensor("int64", 1), False),
        ("stamp", STAMP, True),
        ("image", STAMP, False),
        ("images", text(8), False),
        ("model", text(8), False),
    ],
)
def test_an_input_of_a_models_workflow_is_no_other_field_of_requests(name: str, form: Form, is_fit: bool) -> None:
    workflow = replace(GUARDED, inputs=(*GUARDED.inputs[:-2], Port.of(name, form)))
    assert unfit_name(workflow)[0] == ("" if is_fit else name)


@pytest.mark.parametrize(("name", "is_fit"), [("image", True), ("stream", True), ("lora", True), ("model", False)])
def test_an_input_of_a_workflow_alone_may_be_called_as_any_other_field(name: str, is_fit: bool) -> None:
    workflow = replace(DIAMOND, inputs=(Port.of(name, tensor("float32", 16)),))
    assert unfit_name(workflow)[0] == ("" if is_fit else name)
