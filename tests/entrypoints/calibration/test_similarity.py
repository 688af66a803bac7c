"""SSIM: it equals its formula for each window, is 1 for equal pictures, and ignores pixels outside the box."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from entrypoints.calibration.similarity import BOX_MARGIN, box_with_margin, ssim, ssim_in_box

Pixels = npt.NDArray[np.uint8]


def picture(seed: int, height: int = 24, width: int = 31) -> Pixels:
    """Smooth colours with some noise."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    smooth = 127 + 90 * np.sin(rows[..., None] / 5 + random.random(3)) * np.cos(columns[..., None] / 7)
    return np.asarray(np.clip(smooth + random.normal(0, 12, smooth.shape), 0, 255), np.uint8)


def by_definition(a: Pixels, b: Pixels, window: int) -> float:
    """The paper's equation 13 for every window of every channel, with unbiased variances, averaged."""
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    values = []
    for top in range(a.shape[0] - window + 1):
        for left in range(a.shape[1] - window + 1):
            for channel in range(a.shape[2]):
                x = a[top : top + window, left : left + window, channel].astype(float).ravel()
                y = b[top : top + window, left : left + window, channel].astype(float).ravel()
                (var_x, covariance), (_, var_y) = np.cov(x, y)
                means = (2 * x.mean() * y.mean() + c1) / (x.mean() ** 2 + y.mean() ** 2 + c1)
                values.append(means * (2 * covariance + c2) / (var_x + var_y + c2))
    return float(np.mean(values))


def test_ssim_equals_its_formula() -> None:
    a, b = picture(0), picture(1)
    assert ssim(a, b) == pytest.approx(by_definition(a, b, 7), abs=1e-9)


@pytest.mark.parametrize(("side", "window"), [(6, 5), (5, 5), (4, 3), (7, 7)])
def test_small_pictures_get_a_window_that_fits(side: int, window: int) -> None:
    a, b = picture(0, side, 12), picture(1, side, 12)
    assert ssim(a, b) == pytest.approx(by_definition(a, b, window), abs=1e-9)


def test_equal_pictures_have_ssim_one() -> None:
    assert ssim(picture(3), picture(3)) == pytest.approx(1.0, abs=1e-12)
    flat = np.zeros((9, 9, 3), np.uint8)
    assert ssim(flat, flat) == 1.0


def test_more_noise_lowers_ssim() -> None:
    clean, random = picture(4), np.random.default_rng(0)
    noise = random.normal(0, 1, clean.shape)
    alike = [ssim(clean, np.clip(clean + noise * sigma, 0, 255).astype(np.uint8)) for sigma in (2, 8, 32)]
    assert alike == sorted(alike, reverse=True)
    assert alike[-1] < 0.6


def test_pictures_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        ssim(picture(0), picture(0, 12, 12))


def test_only_the_box_counts() -> None:
    mask = np.zeros((24, 31), bool)
    mask[9:15, 10:20] = True
    a, b = picture(5), picture(5)
    b[: 9 - BOX_MARGIN] = 0
    assert ssim_in_box(a, b, mask) == pytest.approx(1.0, abs=1e-12)
    b[9 - BOX_MARGIN] = 0
    assert ssim_in_box(a, b, mask) < 0.99


def test_the_box_ends_at_the_picture() -> None:
    mask = np.zeros((24, 31), bool)
    mask[0, 30] = True
    assert box_with_margin(mask) == (slice(0, 5), slice(26, 35))
    assert ssim_in_box(picture(6), picture(6), mask) == pytest.approx(1.0, abs=1e-12)


def test_an_empty_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="empty mask"):
        ssim_in_box(picture(0), picture(1), np.zeros((24, 31), bool))
