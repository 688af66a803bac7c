"""References: whole edits with pictures beside the one to edit, through the runner against diffusers' pipelines, in
float32. Sizes are those at which the pipelines would see them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from diffusers import Flux2KleinPipeline
from edits import Edit, picture
from family_rigs import allow_size, make_flux_kontext_rig, make_klein_rig, make_qwen_edit_plus_rig, unmasked_plus
from PIL import Image
from pipeline_rig import Rig, assert_same

from core.ipc.shared_array import Arena

SIZE = (96, 80)
REFERENCES = ((64, 80), (96, 64))


def with_references(rig: Rig, edit: Edit, sizes: tuple[tuple[int, int], ...]) -> Edit:
    edit.references = tuple(edit.share(picture(40 + number, size)) for number, size in enumerate(sizes))
    return edit


def shown(number: int, size: tuple[int, int]) -> Image.Image:
    """A reference as the pipelines take it."""
    return Image.fromarray(picture(40 + number, size))


# -------------------------------------------------------------------------------------------------------------- klein


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[Rig]:
    rig = make_klein_rig(tmp_path_factory.mktemp("model") / "klein", arena)
    yield rig
    rig.pages.close()


def klein_edit(rig: Rig, name: str, number: int, scale: float = 3.0, strength: float = 1.0) -> Edit:
    edit = with_references(rig, rig.edit(name, seed=3, steps=3, size=SIZE), REFERENCES[:number])
    edit.strength, edit.guidance_scale, edit.true_cfg_scale = strength, scale, scale
    edit.negative_prompt = "" if scale > 1 else None
    return edit


@pytest.mark.parametrize(("scale", "strength"), [(3.0, 1.0), (1.0, 0.6)])
def test_a_masked_edit_of_klein_with_a_reference_equals_the_pipeline(klein: Rig, scale: float, strength: float) -> None:
    edit = klein_edit(klein, f"klein-{strength}", 1, scale, strength)
    assert_same(klein.run(edit), klein.expected(edit, image_reference=shown(0, REFERENCES[0])))


def test_klein_with_two_references_equals_the_pipeline_without_a_mask(klein: Rig) -> None:
    edit = klein_edit(klein, "klein-two", 2)
    edit.mask = None  # type: ignore[assignment]
    pipeline = Flux2KleinPipeline(**klein.pipeline.components, is_distilled=False)
    pipeline.set_progress_bar_config(disable=True)
    pictures = [Image.fromarray(picture(edit.seed, SIZE)), *(shown(n, REFERENCES[n]) for n in range(2))]
    made = pipeline(
        image=pictures,
        prompt=edit.prompt,
        width=SIZE[0],
        height=SIZE[1],
        num_inference_steps=edit.steps,
        guidance_scale=edit.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(edit.seed),
        max_sequence_length=16,
    )
    assert_same(klein.run(edit), np.asarray(made.images[0]))


def test_company_changes_nothing(klein: Rig) -> None:
    """With no, one and two references in a batch."""
    edits = [klein_edit(klein, f"together-{number}", number) for number in range(3)]
    alone = [klein.run(edit) for edit in edits]
    for before, together in zip(alone, klein.run_together(edits), strict=True):
        assert np.array_equal(before, together)
    assert not np.array_equal(alone[0], alone[1])
    assert not np.array_equal(alone[1], alone[2])


# ------------------------------------------------------------------------------------------------------------ Kontext


def test_kontext_sees_a_reference_in_place_of_the_picture(tmp_path: Path, arena: Arena) -> None:
    rig = make_flux_kontext_rig(tmp_path / "kontext", arena, guidance_embeds=True)
    edit = with_references(rig, rig.edit("kontext", seed=3, steps=4, size=SIZE), REFERENCES[:1])
    edit.guidance_scale = 2.5
    assert_same(rig.run(edit), rig.expected(edit, image_reference=shown(0, REFERENCES[0])))
    rig.pages.close()


# ------------------------------------------------------------------------------------------------ Qwen-Image-Edit-Plus


@pytest.mark.parametrize("number", [1, 2])
def test_plus_with_references_equals_the_pipeline(tmp_path: Path, arena: Arena, number: int) -> None:
    """Two are three pictures with that to edit. The text encoder sees all of them."""
    rig = make_qwen_edit_plus_rig(tmp_path / "plus", arena, zero_cond_t=number == 2)
    sizes = (SIZE,) * number
    edit = with_references(rig, rig.edit("plus", seed=3, steps=3, size=SIZE, prompt="a red hat"), sizes)
    edit.mask = None  # type: ignore[assignment]
    pipeline, generator = unmasked_plus(rig), torch.Generator("cpu").manual_seed(3)
    pictures = [Image.fromarray(picture(edit.seed, SIZE)), *(shown(n, size) for n, size in enumerate(sizes))]
    with pytest.MonkeyPatch.context() as patch:
        allow_size(patch, SIZE)
        made = pipeline(
            image=pictures,
            prompt=edit.prompt,
            width=SIZE[0],
            height=SIZE[1],
            num_inference_steps=edit.steps,
            generator=generator,
        )
    expected: npt.NDArray[np.uint8] = np.asarray(made.images[0])
    assert_same(rig.run(edit), expected)
    rig.pages.close()
