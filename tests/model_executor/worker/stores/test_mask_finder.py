"""Finding masks: what is computed once, and the tokens under a mask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.selection import Selection
from engine.images import masks
from model_executor.segmenters.segmenter import Found, Seen, Segmenter
from model_executor.worker.stores.mask_finder import Asked, MaskFinder, active_tokens, grown


class Bright(Segmenter):
    """Finds the pixels brighter than the number that the words are."""

    takes = frozenset({"words"})

    def __init__(self) -> None:
        super().__init__({})
        self.looks: list[int] = []
        self.finds = 0

    def look(self, pictures: Sequence[Tensor]) -> list[Seen]:
        self.looks.append(len(pictures))
        return [Seen((picture[None].float(),), *picture.shape[:2]) for picture in pictures]

    def find(self, seen: Seen, selection: Selection) -> Found:
        self.finds += 1
        return Found((seen.tensors[0][0, ..., 0] > int(selection.words)).float(), 0.5)


def asked(content: str, words: str, salt: str = "") -> Asked:
    picture = torch.arange(48, dtype=torch.uint8).view(4, 4, 3) + len(content)
    return Asked(picture, content, salt, Selection(words=words))


@pytest.mark.parametrize(("together", "looks"), [(True, [2]), (False, [1, 1])])
def test_pictures_are_seen_once_and_masks_are_found_once(*, together: bool, looks: list[int]) -> None:
    segmenter = Bright()
    finder = MaskFinder(segmenter, together=together)
    three = [asked("a", "10"), asked("bb", "10"), asked("a", "30")]
    first = finder.find(three)
    assert (segmenter.looks, segmenter.finds) == (looks, 3)
    assert [int(found.mask.sum()) for found in first] == [12, 13, 6]
    again = finder.find([*reversed(three)])
    assert (segmenter.looks, segmenter.finds) == (looks, 3), "nothing is computed again"
    assert all(one is other for one, other in zip(reversed(first), again, strict=True))
    finder.find([asked("a", "40")])
    assert (segmenter.looks, segmenter.finds) == (looks, 4), "the picture is known"


def test_equal_wishes_of_one_call_are_searched_once() -> None:
    segmenter = Bright()
    finder = MaskFinder(segmenter, together=False)
    one, other, _ = finder.find([asked("a", "10"), asked("a", "10"), asked("a", "20")])
    assert one is other
    assert (segmenter.looks, segmenter.finds, finder.num_seen) == ([1], 2, 1)


def test_pictures_are_forgotten_with_the_segmenter_and_masks_are_not() -> None:
    segmenter = Bright()
    finder = MaskFinder(segmenter, together=False)
    finder.find([asked("a", "10")])
    finder.forget_pictures()
    finder.find([asked("a", "10")])
    assert segmenter.looks == [1]
    finder.find([asked("a", "20")])
    assert segmenter.looks == [1, 1]


@pytest.mark.parametrize(("side", "by"), [(1024, 1024), (512, 4096), (1024, 512)])
def test_growing_far_takes_few_passes(side: int, by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client chooses how far."""
    passes = []
    monkeypatch.setattr(Tensor, "__or__", lambda one, other: passes.append(1) or torch.logical_or(one, other))
    mask = torch.zeros(side, side, dtype=torch.bool)
    mask[side // 2, side // 2] = True
    assert grown(mask, by).sum() == min(side, side // 2 + by + 1) ** 2 if by < side // 2 else side**2
    assert len(passes) <= 24


def test_owners_share_nothing() -> None:
    segmenter = Bright()
    finder = MaskFinder(segmenter, together=False)
    finder.find([asked("a", "10", "me")])
    finder.find([asked("a", "10", "you")])
    assert (segmenter.looks, segmenter.finds) == ([1, 1], 2)


@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from([4, 8, 16]),
    st.integers(0, 40),
    st.integers(0, 20),
)
@settings(max_examples=80, deadline=None)
def test_tokens_are_those_that_image_processors_find(
    seed: int, rows: int, columns: int, token: int, margin: int, grow: int
) -> None:
    mask = np.random.default_rng(seed).random((rows * token, columns * token)) < 0.01
    mask[seed % (rows * token), seed % (columns * token)] = True
    size = (columns * token, rows * token)
    keep = masks.grown_keep(np.where(mask, 0, 255).astype(np.uint8), grow)
    wider = grown(torch.from_numpy(mask), grow)
    assert np.array_equal(wider.numpy(), keep == 0)
    assert np.array_equal(active_tokens(wider, margin, token).numpy(), masks.active_tokens(keep, size, token, margin))
