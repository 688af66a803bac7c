"""The offline API checks values when its objects are created: any value is converted, or refused by name."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from arbitrary_values import Name, objects, values
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typing_extensions import TypeAliasType

from core.config import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    ImageConfig,
    ModelConfig,
    RequestDefaults,
    SchedulerConfig,
)
from core.errors import ConfigError, InvalidRequestError
from core.lora import Lora
from core.sampler_defaults import SamplerDefaults
from core.sampling_params import SamplingParams
from core.validation import conformed
from entrypoints.image_engine import Edit, ImageEngine

REQUIRED: dict[type, dict[str, object]] = {Edit: {"prompt": "x"}, AdapterConfig: {"name": "a", "path": "b"}}
CONFIGS = (AdapterConfig, CacheConfig, EngineConfig, ImageConfig, ModelConfig, RequestDefaults, SchedulerConfig)
STRUCTS = (SamplingParams, *CONFIGS)


def fields_of(kind: type) -> tuple[str, ...]:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    return tuple(field.name for field in dataclasses.fields(kind))


def is_plain(value: object) -> bool:
    """Whether a value survives encoding and decoding unchanged: only Python's own types do."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, (*value.keys(), *value.values())))
    return type(value) in (int, float, bool, str, type(None), Lora, SamplerDefaults, *STRUCTS)


def made_or_refused(kind: type, given: dict[str, object]) -> Any:
    """The object; None if a field was refused by name, or valid settings exclude each other."""
    try:
        return kind(**REQUIRED.get(kind, {}) | given)
    except InvalidRequestError as error:
        refused = error.param
    except ConfigError:
        refused = None
    if refused is None:
        assert kind in CONFIGS
    else:
        assert refused in given or {refused, *given} >= {"seed", "n"}, "only seed and n are checked together"
    return None


Number = typing.TypeVar("Number", bound=np.generic)
Array = TypeAliasType("Array", np.ndarray[Any, np.dtype[Number]], type_params=(Number,))


def test_a_name_for_a_class_stands_for_it() -> None:
    """As the `type` statement makes them, with which newer releases of NumPy define NDArray."""
    annotation, array = typing.Union[bytes, Array[np.uint8]], np.zeros(3, np.uint8)  # noqa: UP007  `|` fails before 3.12
    assert conformed("image", array, annotation) is array
    with pytest.raises(InvalidRequestError, match=r"expected `bytes \| ndarray`, got `int`"):
        conformed("image", 1, annotation)


@settings(max_examples=600, deadline=None)
@given(st.one_of(*(objects(kind, fields_of(kind)) for kind in STRUCTS)))
@example((SamplingParams, {"num_inference_steps": 28 * 0.5}))
@example((SamplingParams, {"seed": 1.0}))
@example((SamplingParams, {"guidance_scale": 10**400}))
@example((SamplingParams, {"seed": 10**5000}))
@example((SamplingParams, {"max_sequence_length": 2**64}))
@example((SamplingParams, {"negative_prompt": "x" * 40_000}))
@example((ModelConfig, {"model": ""}))
@example((ModelConfig, {"roles": {"vae": Name.A}}))
@example((ModelConfig, {"roles": {1: "a"}}))
@example((ModelConfig, {"roles": {"vae": "\ud83d"}}))
def test_any_value_in_a_struct_is_refused_by_name_or_can_be_encoded(one: tuple[type, dict[str, object]]) -> None:
    kind, given_values = one
    made = made_or_refused(kind, given_values)
    if made is None:
        return
    assert all(is_plain(value) for value in msgspec.structs.astuple(made))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=kind) == made


@settings(max_examples=600, deadline=None)
@given(objects(Edit, fields_of(Edit)))
@example((Edit, {"size": (512.0, 512.0)}))
@example((Edit, {"size": (-512, 512)}))
@example((Edit, {"size": "512x512"}))
@example((Edit, {"prompt": ""}))
@example((Edit, {"lora": ["hat", Lora("shirt", 0.5)]}))
@example((Edit, {"lora": {"name": "hat", "scale": float("nan")}}))
@example((Edit, {"references": ["", Path("nowhere")]}))
def test_any_value_in_an_edit_is_refused_by_name_or_has_its_type(one: tuple[type, dict[str, object]]) -> None:
    kind, given_values = one
    made = made_or_refused(kind, given_values)
    pictures = ("image", "mask", "mask_image", "references", "controls", "inputs")  # inputs' types are their workflow's
    assert made is None or all(is_plain(getattr(made, name)) for name in fields_of(Edit) if name not in pictures)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(typing.get_type_hints(ImageEngine.__init__).keys() - {"return", "model"})), values)
def test_an_argument_of_the_engine_is_refused_by_name_before_anything_starts(name: str, value: object) -> None:
    """Valid values start nothing here either: the model is not a string, so it is refused."""
    with pytest.raises((InvalidRequestError, ConfigError)) as caught:
        ImageEngine(None, **{name: value})  # type: ignore[arg-type]
    if isinstance(caught.value, InvalidRequestError):
        assert caught.value.param in {"model", name, "path", "name"}


@pytest.mark.parametrize("value", [5, 0.5, [0.5]])
def test_skip_levels_of_another_type_are_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ImageEngine(skip_levels=value)
    assert str(caught.value.param).startswith("skip_levels")


NUMPY = [
    ("seed", np.int64(7), 7),
    ("seed", np.uint64(2**63 - 1), 2**63 - 1),
    ("num_inference_steps", np.uint8(4), 4),
    ("guidance_scale", np.float32(2.5), 2.5),
    ("guidance_scale", np.float64(2.5), 2.5),
    ("guidance_scale", np.int32(2), 2.0),
    ("strength", 1, 1.0),
    ("hires_scale", np.int64(2), 2.0),
    ("mask_aware", np.bool_(False), False),
    ("negative_prompt", np.str_("fog"), "fog"),
]


@pytest.mark.parametrize(("name", "value", "plain"), NUMPY)
def test_numpy_scalars_of_the_right_kind_become_python_scalars(name: str, value: Any, plain: object) -> None:
    made = getattr(SamplingParams(**{name: value}), name)
    assert (made, type(made)) == (plain, type(plain))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", True),
        ("seed", np.bool_(True)),
        ("seed", np.float64(1)),
        ("seed", np.timedelta64(1)),
        ("seed", "1"),
        ("n", 2.0),
        ("strength", True),
        ("strength", "1"),
        ("mask_aware", 1),
        ("mask_aware", np.int64(1)),
        ("mask_aware", "true"),
        ("negative_prompt", b"fog"),
        ("timeout", np.array([1.0])),
    ],
)
def test_values_of_another_type_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"Invalid type for '{name}': expected `.*`, got `") as caught:
        SamplingParams(**{name: value})
    assert (caught.value.param, caught.value.code) == (name, "invalid_type")


def test_sizes_are_a_pair_of_integers_in_range() -> None:
    assert Edit(prompt="x", size=[np.int64(64), 32]).size == (64, 32)  # type: ignore[arg-type]
    for size in ((15, 64), (64, 4097), (64,), (64, 64, 64), (64, True), "64x64", 64, np.zeros(2, np.int64)):
        with pytest.raises(InvalidRequestError) as caught:
            Edit(prompt="x", size=size)  # type: ignore[arg-type]
        assert caught.value.param == "size"


def test_pictures_that_exclude_each_other_are_refused() -> None:
    for names, param in ((("mask", "mask_image"), "mask"), (("image", "template_id"), "template_id")):
        with pytest.raises(InvalidRequestError) as caught:
            Edit(prompt="x", **dict.fromkeys(names, "a.png"))  # type: ignore[arg-type]
        assert caught.value.param == param
