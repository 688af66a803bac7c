"""Choosing the model and adapter that a request names."""

from __future__ import annotations

import msgspec
import pytest
from fakes import MODEL

from core.errors import InvalidRequestError, ModelNotFoundError
from core.model_choice import choose_model, kin

NAMES = {"plain": "", "other": "", "shirt": "plain", "hat": "plain", "coat": "other"}
MODELS = {name: msgspec.structs.replace(MODEL, name=name, parent=parent) for name, parent in NAMES.items()}


@pytest.mark.parametrize(
    ("name", "lora", "chosen"),
    [
        ("", "", "plain"),
        ("other", "", "other"),
        ("", "shirt", "shirt"),
        ("plain", "hat", "hat"),
        ("other", "coat", "coat"),
        ("hat", "", "hat"),
        ("hat", "hat", "hat"),
    ],
)
def test_an_adapter_is_named_beside_its_model_or_instead(name: str, lora: str, chosen: str) -> None:
    assert choose_model(MODELS, name, lora).name == chosen


@pytest.mark.parametrize(("name", "lora"), [("", "coat"), ("plain", "plain"), ("other", "hat"), ("", "Shirt")])
def test_another_models_adapter_is_unknown(name: str, lora: str) -> None:
    with pytest.raises(InvalidRequestError, match="Supported values are: '") as caught:
        choose_model(MODELS, name, lora)
    assert caught.value.param == "lora"


def test_a_model_without_adapters() -> None:
    with pytest.raises(InvalidRequestError, match=r"'plain' is served without adapters.*--lora"):
        choose_model({"plain": MODELS["plain"]}, "", "shirt")
    with pytest.raises(InvalidRequestError, match="'hat' is served without adapters"):
        choose_model(MODELS, "hat", "shirt")
    with pytest.raises(ModelNotFoundError):
        choose_model(MODELS, "dress", "shirt")


def test_related_models_are_a_model_and_its_adapters() -> None:
    assert kin(MODELS, "plain") == kin(MODELS, "hat") == ["plain", "shirt", "hat"]
    assert kin(MODELS, "coat") == ["other", "coat"]
