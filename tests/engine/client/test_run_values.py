"""Values of callers as arrays, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from core.errors import InvalidRequestError
from core.graph.form import INTEGER, NUMBER, TRUTH, Form, picture, tensor, text
from engine.client.run_values import array_at, from_array, to_array


@pytest.mark.parametrize(
    ("form", "value"),
    [
        (TRUTH, True),
        (INTEGER, -(2**63)),
        (NUMBER, 0.5),
        (text(8), "grüße"),
        (text(8), ""),
        (picture(4, 4), np.zeros((2, 3, 3), np.uint8)),
        (tensor("float16", 4), np.arange(3, dtype=np.float16)),
        (tensor("float32"), np.array(1.5, np.float32)),
        (tensor("int64", 4, 4), np.arange(8).reshape(4, 2).T),
        (tensor("float32", 4), np.arange(3, dtype=">f4")),
    ],
)
def test_a_value_comes_back_as_it_was(form: Form, value: Any) -> None:
    array = to_array("x", form, value)
    place = np.zeros(form.nbytes, np.uint8)
    array_at(form, place, array.shape)[...] = array
    back = from_array(form, array_at(form, place, array.shape))
    assert np.array_equal(back, value)
    assert isinstance(back, np.ndarray) or type(back) is type(value)


def test_numbers_of_numpy_are_numbers() -> None:
    assert to_array("x", INTEGER, np.int32(3)).item() == 3
    assert to_array("x", NUMBER, 3).item() == 3.0


@pytest.mark.parametrize(
    ("form", "value", "reason"),
    [
        (TRUTH, 1, "it is a int, and truth is declared"),
        (INTEGER, True, "it is a bool, and integer is declared"),
        (INTEGER, 2**63, "it is no integer"),
        (INTEGER, 1.0, "it is a float"),
        (NUMBER, "1", "it is a str"),
        (NUMBER, float("inf"), "it is no finite number"),
        (NUMBER, 10**400, "it is no finite number"),
        (tensor("float16", 4), np.array([1, np.nan], np.float16), "not all of its numbers are finite"),
        (text(4), b"abc", "it is a bytes"),
        (text(4), "grüße", r"its shape is \[7\], and text of up to 4 bytes is declared"),
        (text(4), "\ud800", "it is no text in UTF-8: surrogates not allowed"),
        (picture(4, 4), np.zeros((2, 3, 4), np.uint8), r"its shape is \[2, 3, 4\], and picture of up to 4 x 4 px"),
        (tensor("float32", 4), [1.0], "it is a list"),
        (tensor("float32", 4), np.zeros(3), "it is float64, and float32 is declared"),
        (tensor("float32", 4), np.array([None]), "it is object"),
    ],
)
def test_what_is_not_of_the_form_is_refused_by_name(form: Form, value: object, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^Invalid 'x': {reason}") as caught:
        to_array("x", form, value)
    assert caught.value.param == "x"
