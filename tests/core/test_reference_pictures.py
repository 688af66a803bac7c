"""The sizes at which models see references, against diffusers."""

from __future__ import annotations

import pytest
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

from core.reference_pictures import MAX_ASPECT, ReferencePictures

PLUS = ReferencePictures(most=15, pixels=1024**2, multiple=32, grows=True)
KLEIN = ReferencePictures(most=15, pixels=1024**2, multiple=16, grows=False)
SIZES = [(64, 64), (1024, 1024), (1920, 1080), (333, 1000), (4000, 3000), (20, 4000), (4000, 20), (5000, 31)]


@pytest.mark.parametrize("size", SIZES)
def test_enlarged_as_the_pipeline_does(size: tuple[int, int]) -> None:
    assert PLUS.size(*size) == calculate_dimensions(1024 * 1024, size[0] / size[1])


@pytest.mark.parametrize(
    ("size", "expected"),
    [((64, 80), (64, 80)), ((70, 95), (64, 80)), ((10, 10), (16, 16)), ((2048, 2048), (1024, 1024)),
     ((3000, 1000), (1760, 576))],
)  # fmt: skip
def test_shrunk_and_cut_to_multiples(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert KLEIN.size(*size) == expected


@pytest.mark.parametrize("rule", [PLUS, KLEIN])
def test_none_is_larger_than_the_bound(rule: ReferencePictures) -> None:
    for height in (1, 7, 16, 100, 1023, 5000):
        for aspect in (1, 2, 13, MAX_ASPECT):
            for size in ((height * aspect, height), (height, height * aspect)):
                wide, high = rule.size(*size)
                assert wide * high <= rule.most_pixels
                assert wide % rule.multiple == high % rule.multiple == 0
