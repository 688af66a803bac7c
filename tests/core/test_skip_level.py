"""SkipLevel: how many steps which similarity allows to skip."""

from __future__ import annotations

import msgspec
import pytest

from core.skip_level import SkipLevel, most_skipped, skips_of


def level(share: float, similarity: float) -> SkipLevel:
    return SkipLevel(share=share, similarity=similarity, ssim_mean=0.98, ssim_p10=0.97, num_pairs=8)


LEVELS = (level(0.2, 0.8), level(0.4, 0.95))


@pytest.mark.parametrize(("steps", "skips"), [(1, ()), (2, ()), (3, (1,)), (8, (1, 3)), (10, (2, 4)), (28, (5, 11))])
def test_no_more_steps_are_skipped_than_the_share(steps: int, skips: tuple[int, ...]) -> None:
    assert skips_of(LEVELS, steps) == skips


@pytest.mark.parametrize(("similarity", "skipped"), [(-1.0, 0), (0.79, 0), (0.8, 2), (0.94, 2), (0.95, 4), (1.0, 4)])
def test_more_similar_prompts_skip_more(similarity: float, skipped: int) -> None:
    assert most_skipped(LEVELS, 10, similarity) == skipped
    assert most_skipped((), 10, similarity) == 0
    assert most_skipped(LEVELS, 10, float("nan")) == 0


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_is_between_none_and_all(share: float) -> None:
    text = msgspec.json.encode(msgspec.structs.asdict(level(0.5, 1)) | {"share": share})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=SkipLevel)
