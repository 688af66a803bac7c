"""Defaults of a workflow's requests: which of them a request follows, and what is refused when a server starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.errors import WorkflowError
from core.graph.workflows.inpaint import INPAINT
from entrypoints.openai.fields.default_fields import check_defaults, defaults_of, left_open

SAID: dict[str, Any] = {
    "size": "64x64",
    "seed": 5,
    "num_inference_steps": 4,
    "guidance_scale": 3.0,
    "max_sequence_length": 256,
    "mask_grow": 3,
    "mask_aware": False,
    "control_scale": "[0.5, 1]",
}
DEFAULTS = defaults_of(replace(INPAINT, defaults=SAID))


def followed(is_edit: bool = False, is_steered: bool = False, **given: Any) -> dict[str, Any]:
    return left_open(DEFAULTS, given, is_edit=is_edit, is_steered=is_steered, most_tokens=77)


def test_a_request_follows_what_it_leaves_open() -> None:
    check_defaults(replace(INPAINT, defaults=SAID))
    usual = {"seed": 5, "num_inference_steps": 4, "guidance_scale": 3.0, "max_sequence_length": 77, "mask_aware": False}
    assert followed() == usual | {"size": "64x64"}
    assert followed(is_edit=True) == usual | {"mask_grow": 3}
    assert followed(is_steered=True)["control_scale"] == (0.5, 1.0)
    assert followed(seed=7, guidance_scale=2.0).keys() == usual.keys() - {"seed", "guidance_scale"} | {"size"}
    for said in ({"steps": 3}, {"quality": "high"}):
        assert "num_inference_steps" not in followed(**said)
    assert followed(quality="auto", size="auto") == followed(quality="standard") == followed()
    assert "size" not in followed(size="128x128")


@pytest.mark.parametrize(
    ("defaults", "problem"),
    [
        ({"n": 2}, "default n: no default; there are prompt"),
        ({"seed": "x"}, "default seed: Invalid type for 'seed': expected an integer"),
        ({"guidance_scale": 1000.0}, "default guidance_scale: Invalid 'guidance_scale': decimal above maximum value"),
        ({"size": "big"}, "default size: Invalid value: 'big'"),
        ({"size": "64x1024"}, "default size: Invalid value: '64x1024'. The aspect ratio must be between 1:3 and 3:1"),
        ({"prompt": ""}, "default prompt: Invalid 'prompt': empty string"),
    ],
)
def test_what_no_request_could_say_is_refused(defaults: dict[str, Any], problem: str) -> None:
    with pytest.raises(WorkflowError, match=problem):
        check_defaults(replace(INPAINT, defaults=defaults))
