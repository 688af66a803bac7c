"""What an edit may say of a mask that is to be found."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from fakes import MODEL

from core.errors import InvalidRequestError
from core.mask_request import MaskRequest
from engine.client.edit_types import EditInput
from engine.client.resolve.sought_mask import check_sought_mask
from engine.client.upload import BytesUpload

WORDS = msgspec.structs.replace(MODEL, selects_by=("words",))
EVERYTHING = msgspec.structs.replace(MODEL, selects_by=("box", "points", "words"))
FILE = BytesUpload(b"picture")
EDIT = EditInput(prompt="a hat", image=FILE, mask_request=MaskRequest(prompt="the cap"))


def test_a_picture_and_words_are_enough() -> None:
    check_sought_mask(EDIT, WORDS)
    check_sought_mask(replace(EDIT, image=None, template_id="t"), WORDS)
    check_sought_mask(EditInput(prompt="a hat"), MODEL)


@pytest.mark.parametrize(
    ("changes", "model", "param", "message"),
    [
        ({"image": None}, WORDS, "mask_prompt", "no picture"),
        ({"mask": FILE}, WORDS, "mask_prompt", "leave one of them out"),
        ({"padding_mask_crop": 8}, WORDS, "padding_mask_crop", "get the mask first"),
        ({}, MODEL, "mask_prompt", "--segmenter"),
        ({"mask_request": MaskRequest(points=((1, 1),))}, WORDS, "mask_points", "takes mask_prompt alone"),
        ({"mask_request": MaskRequest(prompt="x", box=(0, 0, 1, 1))}, WORDS, "mask_box", "takes mask_prompt alone"),
        ({"mask_request": None, "makes_mask": True}, EVERYTHING, "mask_prompt", "Missing"),
    ],
)
def test_what_excludes_a_mask_that_is_found(
    changes: dict[str, object], model: object, param: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        check_sought_mask(replace(EDIT, **changes), model)  # type: ignore[arg-type]
    assert caught.value.param == param
