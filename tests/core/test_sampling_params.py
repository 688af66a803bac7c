"""SamplingParams refuses values out of range, with the API's error codes, wherever it is created."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from core.errors import InvalidRequestError
from core.sampling_params import MAX_HIRES_SCALE, MAX_SEED, MIN_HIRES_SCALE, SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("num_inference_steps", 0, "integer_below_min_value"),
        ("num_inference_steps", 201, "integer_above_max_value"),
        ("guidance_scale", -1.0, "decimal_below_min_value"),
        ("true_cfg_scale", 100.1, "decimal_above_max_value"),
        ("guidance_scale", float("nan"), "invalid_value"),
        ("shift", 0.0, "decimal_below_min_value"),
        ("shift", 101.0, "decimal_above_max_value"),
        ("sigmas", (), "invalid_value"),
        ("sigmas", (0.5, 0.5), "invalid_value"),
        ("sigmas", (1.1, 0.5), "invalid_value"),
        ("sigmas", (1.0, 0.0), "invalid_value"),
        ("sigmas", (1.0, float("nan")), "invalid_value"),
        ("sigmas", (1.0, 1.0 - 1e-9), "invalid_value"),
        ("sigmas", tuple(1 - step / 300 for step in range(201)), "invalid_value"),
        ("n", 0, "integer_below_min_value"),
        ("n", 11, "integer_above_max_value"),
        ("seed", -1, "integer_below_min_value"),
        ("strength", 1.1, "decimal_above_max_value"),
        ("hires_scale", 1.0, "decimal_below_min_value"),
        ("hires_scale", 4.1, "decimal_above_max_value"),
        ("hires_strength", 1.1, "decimal_above_max_value"),
        ("max_sequence_length", 0, "integer_below_min_value"),
        ("mask_margin", -1, "integer_below_min_value"),
        ("full_steps", 201, "integer_above_max_value"),
        ("priority", 2**40, "integer_above_max_value"),
        ("timeout", 0.0, "decimal_below_min_value"),
        ("timeout", float("inf"), "invalid_value"),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: Any, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert (caught.value.param, caught.value.code) == (name, code)
    with pytest.raises(InvalidRequestError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({name: value}), type=SamplingParams)


def test_seeds_of_all_n_images_fit() -> None:
    SamplingParams(seed=MAX_SEED - 9, n=10)
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(seed=MAX_SEED - 8, n=10)
    assert caught.value.param == "seed"


def test_bounds_are_inclusive() -> None:
    low = SamplingParams(num_inference_steps=1, guidance_scale=0, seed=0, strength=0, mask_margin=0, full_steps=0)
    high = SamplingParams(num_inference_steps=200, guidance_scale=100, seed=MAX_SEED, n=1, strength=1, timeout=86400)
    small = SamplingParams(hires_scale=MIN_HIRES_SCALE, hires_strength=0)
    large = SamplingParams(hires_scale=MAX_HIRES_SCALE, hires_strength=1)
    for params in (low, high, small, large, SamplingParams()):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
