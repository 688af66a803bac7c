"""A Frechet distance on the features of a small network that classifies garments' colours and patterns.

The network is trained here in under a minute, on rendered scenes (never on a model's pictures), and kept in the
user's cache folder. The distance is FID's formula (Heusel et al., 2017) on its last hidden layer; its values cannot be
compared with any FID, whose Inception network was trained on photographs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from core.cache_folder import user_cache_folder
from tools.train_embedded.cases import Case, cases
from tools.train_embedded.garments import COLOURS, PATTERNS
from tools.train_embedded.scenes import Pixels
from tools.train_embedded.seeds import CLASSIFIER

FEATURES = 64
TRAINING_CASES = 300
EPOCHS = 16
BATCH = 30
FIRST_SEED = CLASSIFIER + 100_000
"""Scenes that training, evaluation and the pattern classifier do not use."""


class FeatureNet(nn.Module):
    """Four convolutions of stride 2, the mean over places, one layer: [n, 3, h, w] in -1..1 to [n, FEATURES]."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 24, 48, 64, 96)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 5, stride=2, padding=2), nn.GroupNorm(8, after), nn.SiLU()]
        self.trunk = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], FEATURES))
        self.colour = nn.Linear(FEATURES, len(COLOURS))
        self.pattern = nn.Linear(FEATURES, len(PATTERNS))

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.trunk(x)
        return features


def distance(a: Sequence[Pixels], b: Sequence[Pixels]) -> float:
    """Frechet distance of two sets' features, >= 0; 0 for equal sets. Each has at least two pictures."""
    return frechet(_features(a), _features(b))


def frechet(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """|mean difference|^2 + trace(A + B - 2 (A B)^0.5), of rows [n, features]."""
    covariance_a, covariance_b = (np.cov(each, rowvar=False) for each in (a, b))
    # (A B)^0.5 has the trace of (A^0.5 B A^0.5)^0.5, which is symmetric.
    root = _root(covariance_a)
    cross = _root(root @ covariance_b @ root)
    gap = a.mean(0) - b.mean(0)
    return max(0.0, float(gap @ gap + np.trace(covariance_a + covariance_b - 2 * cross)))


def _root(symmetric: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    values, vectors = np.linalg.eigh(symmetric)
    root: npt.NDArray[np.float64] = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    return root


def _features(pictures: Sequence[Pixels]) -> npt.NDArray[np.float64]:
    net = trained()
    with torch.inference_mode():
        parts = [net(_tensor(pictures[start : start + BATCH])) for start in range(0, len(pictures), BATCH)]
    return torch.cat(parts).double().numpy()


def _tensor(pictures: Sequence[Pixels]) -> Tensor:
    """At half size, which garments' patterns survive and which trains in a quarter of the time."""
    stacked = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1
    return nn.functional.avg_pool2d(stacked, 2)


@cache
def trained() -> FeatureNet:
    """The network, from the cache folder if it is there."""
    net, path = FeatureNet(), _path()
    if path.exists():
        net.load_state_dict(torch.load(path, weights_only=True))
    else:
        train(net, cases(FIRST_SEED, TRAINING_CASES), EPOCHS)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        torch.save(net.state_dict(), unfinished)
        unfinished.replace(path)
    return net.eval()


def train(net: FeatureNet, asked: Sequence[Case], epochs: int) -> float:
    """On the cases' true pictures; returns the accuracy on them, 0..1."""
    torch.manual_seed(0)
    pictures = _tensor([case.truth for case in asked])
    colours = torch.tensor([COLOURS.index(case.garment.colour) for case in asked])
    patterns = torch.tensor([PATTERNS.index(case.garment.pattern) for case in asked])
    optimiser = torch.optim.AdamW(net.parameters(), 2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(asked)).split(BATCH):
            features = net(pictures[rows])
            loss = nn.functional.cross_entropy(net.colour(features), colours[rows])
            loss = loss + nn.functional.cross_entropy(net.pattern(features), patterns[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    with torch.inference_mode():
        features = net(pictures)
        right = (net.colour(features).argmax(1) == colours).float() + (net.pattern(features).argmax(1) == patterns)
    return float(right.mean() / 2)


def _path() -> Path:
    return Path(user_cache_folder(os.environ)) / f"feature-net-{FEATURES}-{TRAINING_CASES}-{EPOCHS}.pt"
