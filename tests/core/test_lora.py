"""Adapters as requests name them: any value is read or refused, by the name of its field."""

from __future__ import annotations

from typing import Any

import pytest
from arbitrary_values import values
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequestError
from core.lora import MAX_SCALE, Lora, named_loras


def members(**options: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({}, optional=options)


@settings(max_examples=300, deadline=None)
@given(values | members(name=values, scale=values) | st.lists(members(name=st.text(max_size=3), scale=values)))
def test_any_value_is_read_or_refused(value: object) -> None:
    refused: str | None = ""
    loras: tuple[Lora, ...] = ()
    try:
        loras = named_loras(value)
    except InvalidRequestError as error:
        refused = error.param
    assert refused in ("", "lora")
    for lora in loras:
        assert type(lora.name) is str
        assert type(lora.scale) is float
        assert abs(lora.scale) <= MAX_SCALE
    assert named_loras(loras) == loras


@pytest.mark.parametrize("nothing", [None, "", [], ()])
def test_none_of_them(nothing: object) -> None:
    assert named_loras(nothing) == ()


def test_all_forms() -> None:
    assert named_loras("hat") == named_loras({"name": "hat"}) == named_loras([Lora("hat")]) == (Lora("hat", 1.0),)
    assert named_loras(("hat", {"name": "shirt", "scale": 2})) == (Lora("hat"), Lora("shirt", 2.0))
