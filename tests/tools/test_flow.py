"""The loss weighs masked tokens by their importance, and others lightly."""

import pytest
import torch

from tools.train_embedded.flow import CONTEXT_WEIGHT, weighted_error

INSIDE = torch.tensor([[1.0, 1.0, 0.0]])
WANTED = torch.zeros(1, 3, 64)


def error_at(token: int, importance: torch.Tensor | float = 1.0) -> float:
    """The loss of a unit error at one token, times the sum of all weights."""
    predicted = WANTED.clone()
    predicted[0, token] = 1
    total = (CONTEXT_WEIGHT + (importance - CONTEXT_WEIGHT) * INSIDE).sum()
    return float(weighted_error(predicted, WANTED, INSIDE, importance)[0] * total)


def test_masked_tokens_weigh_one_and_others_less() -> None:
    assert [error_at(token) for token in range(3)] == pytest.approx([1, 1, CONTEXT_WEIGHT])


def test_importance_raises_masked_tokens_only() -> None:
    importance = torch.tensor([[2.0, 1.0, 2.0]])
    assert [error_at(token, importance) for token in range(3)] == pytest.approx([2, 1, CONTEXT_WEIGHT])
