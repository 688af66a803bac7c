"""ImageCosts: predictions grow with pixels, are learnt, and stay plausible for sizes that were never observed."""

from __future__ import annotations

import pytest

from core.costs.image_costs import ImageCosts, ImageWork, Kind

LARGE = ImageWork("png", 0.01, 16.8)


def test_seconds_per_pixel_are_learnt() -> None:
    costs = ImageCosts()
    for index in range(300):
        work = ImageWork("png", index % 5, index % 7)
        costs.observe(work, 0.002 + 0.1 * work.source + 0.25 * work.output)
    assert costs.predict(LARGE) == pytest.approx(0.003 + 0.25 * 16.8, rel=0.1)


def test_one_kind_says_nothing_of_another() -> None:
    costs = ImageCosts()
    before = costs.predict(ImageWork("webp", 1.0, 12.0))
    for _ in range(50):
        costs.observe(LARGE, 30.0)
    assert costs.predict(ImageWork("webp", 1.0, 12.0)) == before


@pytest.mark.parametrize("kind", ["prepare", "png", "webp", "jpeg"])
def test_before_anything_is_known_more_pixels_cost_more(kind: Kind) -> None:
    costs = ImageCosts()
    assert 0 < costs.predict(ImageWork(kind)) < costs.predict(ImageWork(kind, 1.0)) < costs.predict(LARGE) * 3
    assert costs.predict(ImageWork(kind, 0.0, 1.0)) > costs.predict(ImageWork(kind))


def test_thumbnails_say_little_of_photos() -> None:
    """Their cost is hardly due to pixels: attributed to them it would be 0.3 s per megapixel, 40 times too much."""
    costs = ImageCosts()
    before = costs.predict(ImageWork("png", 12.0, 12.0))
    for index in range(2000):
        costs.observe(ImageWork("png", 0.01, 0.01), 0.003 + 0.0005 * (index % 3))
    assert before / 3 < costs.predict(ImageWork("png", 12.0, 12.0)) < before * 3
    assert costs.predict(ImageWork("png", 0.01, 0.01)) == pytest.approx(0.0035, rel=0.1)
