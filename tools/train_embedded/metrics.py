"""Metrics of whether an edit shows what its prompt asks for, computed from pixels only.

colour   the palette's nearest name, in CIELAB, to the per-channel median of the garment's pixels
pattern  linear discriminant analysis of the cloth's autocorrelation, fitted on renders only
shape    intersection over union of the pixels in the prompt's colour with the ground truth's silhouette

The metrics themselves make errors, so every figure is published beside the ground truth's score.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tools.train_embedded.cases import Case, cases
from tools.train_embedded.garments import COLOURS, PALETTE, PATTERNS
from tools.train_embedded.masks import Mask
from tools.train_embedded.scenes import Pixels
from tools.train_embedded.seeds import CLASSIFIER

Floats = NDArray[np.float64]

# Shifts in pixels (down, right) of the cloth's autocorrelation; patterns repeat every 8 or 16 px.
SHIFTS = ((0, 2), (2, 0), (0, 4), (4, 0), (4, 4), (-4, 4), (0, 8), (8, 0), (8, 8), (-8, 8), (0, 16), (16, 0))
CLASSIFIER_RENDERS = 300
SHAPE_REACH = 22.0  # CIELAB distance up to which a pixel has the prompt's colour, to allow for folds and light


def lab(rgb: NDArray[np.generic]) -> Floats:
    """sRGB 0..255 [..., 3] to CIELAB under D65 [..., 3] (IEC 61966-2-1 and CIE 15)."""
    c = np.asarray(rgb, np.float64) / 255
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    )
    xyz = linear @ to_xyz.T / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], -1)


_PALETTE_LAB = lab(np.array([PALETTE[name] for name in COLOURS]))


def read_colour(image: Pixels, mask: Mask) -> str:
    median = np.median(image[mask], axis=0)
    return COLOURS[int(np.argmin(np.linalg.norm(_PALETTE_LAB - lab(median), axis=-1)))]


def cloth_features(image: Pixels, mask: Mask) -> Floats:
    """Log variance of the cloth and its autocorrelation at each of SHIFTS, after removing slow shading."""
    luminance = image.astype(np.float64) @ np.array([0.299, 0.587, 0.114])
    weight = _eroded(mask).astype(np.float64)
    detail = (luminance - local_mean(luminance, weight, 8)) * weight
    variance = (detail**2).sum() / max(1.0, weight.sum())
    correlations = [_correlation(detail, weight, shift) / (variance + 1.0) for shift in SHIFTS]
    return np.array([np.log(variance + 1.0), *correlations])


def _eroded(mask: Mask) -> Mask:
    """The mask without its outermost 4 pixels, where the garment's outline would look like a pattern."""
    eroded = mask.copy()
    for _ in range(4):
        padded = np.pad(eroded, 1)
        eroded = eroded & padded[2:, 1:-1] & padded[:-2, 1:-1] & padded[1:-1, 2:] & padded[1:-1, :-2]
    return eroded if eroded.sum() >= 100 else mask


def local_mean(values: Floats, weight: Floats, radius: int) -> Floats:
    """Weighted mean over a square window of 2 * radius pixels: one repeat of the cloth."""

    def window_sum(x: Floats) -> Floats:
        total = np.pad(np.pad(x, radius).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        w = 2 * radius
        n, m = x.shape
        summed: Floats = total[w : w + n, w : w + m] - total[:n, w : w + m] - total[w : w + n, :m] + total[:n, :m]
        return summed

    return window_sum(values * weight) / np.maximum(1.0, window_sum(weight))


def _correlation(detail: Floats, weight: Floats, shift: tuple[int, int]) -> float:
    down, right = shift
    a = detail[max(0, -down) : detail.shape[0] - max(0, down), : detail.shape[1] - right]
    b = detail[max(0, down) : detail.shape[0] + min(0, down), right:]
    wa = weight[max(0, -down) : weight.shape[0] - max(0, down), : weight.shape[1] - right]
    wb = weight[max(0, down) : weight.shape[0] + min(0, down), right:]
    return float((a * b).sum() / max(1.0, (wa * wb).sum()))


@dataclass(frozen=True)
class PatternClassifier:
    """Linear discriminant analysis with a shared, shrunk covariance; rows follow PATTERNS."""

    weights: Floats  # [patterns, features]
    biases: Floats  # [patterns]

    def read(self, image: Pixels, mask: Mask) -> str:
        return PATTERNS[int(np.argmax(self.weights @ cloth_features(image, mask) + self.biases))]


def fit_patterns(rendered: Sequence[Case]) -> PatternClassifier:
    """Fit the classifier on ground-truth renders, never on pictures that a model made."""
    features = np.array([cloth_features(case.truth, case.silhouette) for case in rendered])
    labels = np.array([PATTERNS.index(case.garment.pattern) for case in rendered])
    means = np.array([features[labels == i].mean(0) for i in range(len(PATTERNS))])
    spread = features - means[labels]
    covariance = spread.T @ spread / len(features)
    shrunk = 0.9 * covariance + 0.1 * np.diag(np.diag(covariance)) + 1e-6 * np.eye(len(covariance))
    weights = np.linalg.solve(shrunk, means.T).T
    return PatternClassifier(weights, -0.5 * (weights * means).sum(1))


@cache
def pattern_classifier(renders: int = CLASSIFIER_RENDERS) -> PatternClassifier:
    return fit_patterns(cases(CLASSIFIER, renders))


def shape_overlap(image: Pixels, case: Case) -> float:
    """Intersection over union, in the mask, of the pixels in the prompt's colour with the ground truth's silhouette."""
    asked = _PALETTE_LAB[COLOURS.index(case.garment.colour)]
    coloured = (np.linalg.norm(lab(image) - asked, axis=-1) < SHAPE_REACH) & case.mask
    union = (coloured | case.silhouette).sum()
    return float((coloured & case.silhouette).sum() / union) if union else 0.0


@dataclass(frozen=True)
class Scores:
    """Results over a set of cases."""

    colour: float  # share of cases with the right colour
    pattern: float  # share with the right pattern
    shape: float  # mean overlap of plain garments
    colour_by_name: dict[str, float]
    pattern_by_name: dict[str, float]
    cases: int


def score(images: Sequence[Pixels], asked: Sequence[Case], classifier: PatternClassifier | None = None) -> Scores:
    """Scores of `images`, one for each case of `asked`.

    Colour and pattern are read in the garment's silhouette, not in the whole mask, whose edge shows the room.
    """
    reader = classifier or pattern_classifier()
    colours = [read_colour(i, c.silhouette) == c.garment.colour for i, c in zip(images, asked, strict=True)]
    patterns = [reader.read(i, c.silhouette) == c.garment.pattern for i, c in zip(images, asked, strict=True)]
    plain = [(i, c) for i, c in zip(images, asked, strict=True) if c.garment.pattern == "plain"]
    return Scores(
        colour=float(np.mean(colours)),
        pattern=float(np.mean(patterns)),
        shape=float(np.mean([shape_overlap(i, c) for i, c in plain])) if plain else 0.0,
        colour_by_name=_shares(colours, [c.garment.colour for c in asked]),
        pattern_by_name=_shares(patterns, [c.garment.pattern for c in asked]),
        cases=len(asked),
    )


def _shares(right: Sequence[bool], names: Sequence[str]) -> dict[str, float]:
    return {
        name: round(float(np.mean([ok for ok, n in zip(right, names, strict=True) if n == name])), 3)
        for name in sorted(set(names))
    }


def shuffled(asked: Sequence[Case], seed: int) -> list[Case]:
    """The cases with permuted prompts, to score a model that ignores its prompt."""
    order = np.random.default_rng(seed).permutation(len(asked))
    return [replace(case, garment=asked[int(j)].garment) for case, j in zip(asked, order, strict=True)]
