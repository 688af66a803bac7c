"""Weights in host memory, watched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from model_executor.host_weights import HostWeights


def poison_what_lies_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have modules see NaN in place of weights that are not on the device, so that using them shows."""

    def leave(weights: HostWeights) -> None:
        weights._is_there = False
        weights._point_to(torch.full_like(weights._host, 0xFF))

    monkeypatch.setattr(HostWeights, "_leave", leave)


class Copies:
    """Counts copies to the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._number = 0
        self._come = HostWeights._come
        monkeypatch.setattr(HostWeights, "_come", self._counted())

    def _counted(self) -> Callable[[HostWeights], None]:
        def come(weights: HostWeights) -> None:
            self._number += 1
            self._come(weights)

        return come

    def take(self) -> int:
        """How many there were since the last call."""
        taken, self._number = self._number, 0
        return taken
