"""Qwen-Image-Edit and Qwen-Image: whole edits through the runner against diffusers' inpaint pipelines, float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import PictureProcessor, make_qwen, make_qwen_edit
from diffusers import (
    QwenImageEditInpaintPipeline,
    QwenImageInpaintPipeline,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_inpaint
from edits import Edit
from pipeline_rig import Rig, assert_same

from core.ipc.shared_array import Arena

PROMPT = "a red hat"
NEGATIVE_PROMPT = "blue"


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = Arena.create(1, 1 << 26)
    yield arena
    arena.close()


def make_edit_rig(path: Path, arena: Arena, **options: Any) -> Rig:
    checkpoint = make_qwen_edit(path, **options)
    processor = PictureProcessor.of_checkpoint(checkpoint)
    rig = Rig(checkpoint, arena, QwenImageEditInpaintPipeline, processor=processor)
    encoder = rig.pipeline.text_encoder
    forward = encoder.forward

    def told_of_pictures(input_ids: torch.Tensor, **inputs: Any) -> Any:
        """What the processor says and diffusers' pipeline, up to 0.42, does not pass on."""
        return forward(input_ids, mm_token_type_ids=(input_ids == processor.image_token_id).int(), **inputs)

    encoder.forward = told_of_pictures
    return rig


def make_plain_rig(path: Path, arena: Arena, **options: Any) -> Rig:
    return Rig(make_qwen(path, **options), arena, QwenImageInpaintPipeline)


MAKE = {"edit": make_edit_rig, "plain": make_plain_rig}


@pytest.fixture(scope="module", params=MAKE)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[Rig]:
    rig = MAKE[request.param](tmp_path_factory.mktemp("model") / request.param, arena)
    yield rig
    rig.pages.close()


def make_edit(rig: Rig, name: str, size: tuple[int, int], strength: float, scale: float, **options: int) -> Edit:
    """scale: of guidance away from NEGATIVE_PROMPT; 1 for none."""
    edit = rig.edit(name, size=size, prompt=PROMPT, **options)
    edit.strength, edit.true_cfg_scale = strength, scale
    edit.negative_prompt = NEGATIVE_PROMPT if scale > 1 else None
    return edit


def expected(rig: Rig, edit: Edit) -> Any:
    """The pipeline's, at the edit's size: Qwen-Image-Edit's knows only one area, a million pixels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_qwenimage_edit_inpaint, "calculate_dimensions", lambda *_: (*edit.size, None))
        return rig.expected(edit, true_cfg_scale=edit.true_cfg_scale, negative_prompt=edit.negative_prompt)


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("size", [(128, 128), (96, 160)])
def test_edit_equals_the_pipeline(rig: Rig, size: tuple[int, int], strength: float, scale: float) -> None:
    edit = make_edit(rig, f"{size}-{strength}-{scale}", size, strength, scale, seed=3, steps=5)
    assert_same(rig.run(edit), expected(rig, edit))
