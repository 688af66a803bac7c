"""Choosing the model and the adapters that a request names."""

from __future__ import annotations

import msgspec
import pytest
from fakes import MODEL

from core.errors import InvalidRequestError, ModelNotFoundError
from core.lora import Lora
from core.model_choice import choose_model
from core.patches import Patch

NAMES = {"plain": "", "other": "", "shirt": "plain", "hat": "plain", "coat": "other"}
MODELS = {
    name: msgspec.structs.replace(MODEL, name=name, parent=parent, patch=f"{name}'s" if parent else "")
    for name, parent in NAMES.items()
}


@pytest.mark.parametrize(
    ("name", "loras", "model", "patches"),
    [
        ("", [], "plain", []),
        ("other", [], "other", []),
        ("", ["shirt"], "plain", ["shirt's"]),
        ("plain", ["hat"], "plain", ["hat's"]),
        ("other", ["coat"], "other", ["coat's"]),
        ("hat", [], "plain", ["hat's"]),
        ("hat", ["hat"], "plain", ["hat's"]),
        ("", ["shirt", "hat"], "plain", ["hat's", "shirt's"]),
    ],
)
def test_adapters_are_named_beside_their_model_or_one_instead(
    name: str, loras: list[str], model: str, patches: list[str]
) -> None:
    choice = choose_model(MODELS, name, [Lora(lora) for lora in loras])
    assert (choice.model.name, [patch.id for patch in choice.patches]) == (model, patches)


def test_each_has_its_scale() -> None:
    assert choose_model(MODELS, "hat", [Lora("hat", 0.5)]).patches == (Patch("hat's", 0.5),)
    both = choose_model(MODELS, "", [Lora("shirt", -1.0), Lora("hat", 0.5)])
    assert both.patches == (Patch("hat's", 0.5), Patch("shirt's", -1.0))
    assert [lora.name for lora in both.loras] == ["shirt", "hat"]


@pytest.mark.parametrize(("name", "lora"), [("", "coat"), ("plain", "plain"), ("other", "hat"), ("", "Shirt")])
def test_another_models_adapter_is_unknown(name: str, lora: str) -> None:
    with pytest.raises(InvalidRequestError, match="Supported values are: '") as caught:
        choose_model(MODELS, name, [Lora(lora)])
    assert caught.value.param == "lora"


def test_a_model_without_adapters() -> None:
    with pytest.raises(InvalidRequestError, match=r"'plain' is served without adapters; GET /v1/models"):
        choose_model({"plain": MODELS["plain"]}, "", [Lora("shirt")])
    with pytest.raises(ModelNotFoundError):
        choose_model(MODELS, "dress", [Lora("shirt")])


def test_an_adapter_in_the_models_place_allows_no_other() -> None:
    for loras in (["shirt"], ["hat", "shirt"]):
        with pytest.raises(InvalidRequestError, match="'hat' is an adapter; name the model 'plain' beside others"):
            choose_model(MODELS, "hat", [Lora(lora) for lora in loras])


def test_an_adapter_named_twice() -> None:
    with pytest.raises(InvalidRequestError, match="'hat' is named twice") as caught:
        choose_model(MODELS, "", [Lora("hat"), Lora("shirt"), Lora("hat", 0.5)])
    assert caught.value.param == "lora"
