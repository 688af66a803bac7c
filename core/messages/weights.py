"""Messages from a worker to the keeper of weights, and back."""

from __future__ import annotations

from core.config import ModelConfig
from core.failure import Failure
from core.handles import ModelKey
from core.messages.message import Message


class TakeWeights(Message, frozen=True):
    """Load a component, unless it is kept already, and send it; for use on a CPU in the form that it is computed with,
    so that weights are packed once.
    """

    key: ModelKey
    model: ModelConfig  # one that it is part of, as the worker has opened it
    part: str  # of the checkpoint
    cpu_threads: int  # with which the sender computes, on which the form depends; 0: it computes on another device


class DropWeights(Message, frozen=True):
    """The sender does not use a component any more. It has no answer."""

    key: ModelKey


ToKeeper = TakeWeights | DropWeights


class WeightsTaken(Message, frozen=True):
    """The answer to TakeWeights; the memfd travels with it. See `model_executor.weights.image`."""

    start: int
    nbytes: int


class WeightsFailed(Message, frozen=True):
    """The answer to TakeWeights, if it cannot be loaded."""

    failure: Failure


FromKeeper = WeightsTaken | WeightsFailed
