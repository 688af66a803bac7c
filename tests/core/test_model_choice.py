"""Choosing the model and the adapters that a request names."""

from __future__ import annotations

import msgspec
import pytest
from fakes import MODEL

from core.errors import InvalidRequestError, ModelNotFoundError
from core.lora import Lora
from core.model_choice import choose_model
from core.patches import Patch
from core.sampler_defaults import SamplerDefaults
from core.step_schedule import StepSchedule

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


def test_adapters_bring_their_defaults_the_first_before_others() -> None:
    schedule = StepSchedule(num_inference_steps=8, computed=(0, 4), ssim_mean=0.99, ssim_p10=0.98)
    base = msgspec.structs.replace(
        MODELS["plain"], default_shift=2.0, default_true_cfg_scale=4.0, step_schedules=(schedule,)
    )
    brought = {
        "shirt": SamplerDefaults(num_inference_steps=4, true_cfg_scale=1.0),
        "hat": SamplerDefaults(num_inference_steps=8, guidance_scale=2.5, shift=3.0),
        "cap": SamplerDefaults(guidance_scale=1.0),
    }
    adapters = {
        name: msgspec.structs.replace(base, name=name, parent="plain", patch=name, defaults=defaults)
        for name, defaults in brought.items()
    }

    def chosen(*loras: Lora, name: str = "") -> tuple[object, ...]:
        model = choose_model({"plain": base} | adapters, name, loras).model
        assert model.name == "plain"
        numbers = model.default_num_inference_steps, model.default_guidance_scale
        return *numbers, model.default_true_cfg_scale, model.default_shift, len(model.step_schedules)

    assert chosen() == (8, 30.0, 4.0, 2.0, 1)
    assert chosen(Lora("shirt")) == chosen(name="shirt") == (4, 30.0, 1.0, 2.0, 0)
    assert chosen(Lora("shirt"), Lora("hat", 0.5)) == (4, 2.5, 1.0, 3.0, 0)
    assert chosen(Lora("hat"), Lora("shirt")) == (8, 2.5, 1.0, 3.0, 0)
    assert chosen(Lora("hat", 0.0), Lora("shirt")) == (4, 30.0, 1.0, 2.0, 0)
    assert chosen(Lora("cap")) == (8, 1.0, 4.0, 2.0, 1)


def test_noise_levels_are_of_as_many_steps() -> None:
    levels = SamplerDefaults(sigmas=(1.0, 0.5))
    assert levels.num_inference_steps == 2
    assert SamplerDefaults(num_inference_steps=3).over(levels).sigmas is None
    assert SamplerDefaults(num_inference_steps=2, shift=3.0).over(levels) == SamplerDefaults(sigmas=(1, 0.5), shift=3)
    assert levels.over(SamplerDefaults(num_inference_steps=3, shift=3.0)) == SamplerDefaults(sigmas=(1, 0.5), shift=3)
    with pytest.raises(InvalidRequestError, match="2 noise levels, and num_inference_steps is 3; give one of them"):
        SamplerDefaults(num_inference_steps=3, sigmas=(1.0, 0.5))


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
