"""Weights between those before a training and those after it."""

from __future__ import annotations

import torch

from tools.train_embedded.export import between


def test_weights_lie_on_the_line() -> None:
    before = {"transformer": {"w": torch.tensor([0.0, 4.0])}, "text_encoder": {"w": torch.zeros(1)}}
    after = {"transformer": {"w": torch.tensor([1.0, 0.0])}, "text_encoder": {"w": torch.ones(1)}}
    mixed = between(before, after, 0.75)
    torch.testing.assert_close(mixed["transformer"]["w"], torch.tensor([0.75, 1.0]))
    torch.testing.assert_close(mixed["text_encoder"]["w"], torch.tensor([0.75]))
    torch.testing.assert_close(between(before, after, 1.0), after)
