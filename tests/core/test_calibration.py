"""Calibration files: files of older versions can be read, invalid ones are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from core.calibration import Calibration

FILE = {
    "keyframes": [1.0, 0.5, 0.0],
    "dtype": "int8",
    "full_steps": 1,
    "mask_margin": 8,
    "safe": True,
    "ssim_mean": 0.99,
    "ssim_p10": 0.97,
    "num_edits": 16,
    "num_inference_steps": 8,
}
"""As it was written before full steps went by the mask ratio."""


def parse(**changes: Any) -> Calibration:
    return msgspec.json.decode(msgspec.json.encode(FILE | changes), type=Calibration)


def test_an_older_file_keeps_its_meaning() -> None:
    """Full steps for masks of every size."""
    found = parse()
    assert (found.full_steps, found.full_steps_from) == (1, 0.0)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_a_file_comes_back_as_it_was_written(ratio: float) -> None:
    found = parse(full_steps_from=ratio)
    assert found.full_steps_from == ratio
    assert msgspec.json.decode(msgspec.json.encode(found), type=Calibration) == found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"full_steps_from": 1.5}, "full_steps_from"),
        ({"full_steps_from": -0.1}, "full_steps_from"),
        ({"full_steps_from": "0.3"}, "full_steps_from"),
        ({"full_steps": -1}, "full_steps"),
        ({"keyframes": [1.0, 0.2]}, "fall from 1 to 0"),
        ({"keyframes": [0.0, 1.0]}, "fall from 1 to 0"),
        ({"full_step": 2}, "full_step"),
    ],
)
def test_invalid_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        parse(**changes)
