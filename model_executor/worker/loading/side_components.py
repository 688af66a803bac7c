"""SideComponents: what works for models beside their own parts, and is loaded when the first request needs it."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from core.handles import ModelKey
from core.model_info import ModelInfo
from model_executor.checkpoint.loader import ModelCheckpoint


class SideComponents(Protocol):
    """The components of one kind, of all models of a worker."""

    @property
    def keys(self) -> list[ModelKey]:
        """All components."""

    def users_of(self, key: ModelKey) -> list[str]:
        """The models that a component works for."""

    def origin(self, key: ModelKey) -> tuple[ModelCheckpoint, str]:
        """(checkpoint, part of it) of a component. Raises KeyError if none of these is it."""

    def put(self, key: ModelKey, module: nn.Module) -> None:
        """Put a component that was loaded in use."""

    def drop(self, key: ModelKey) -> None:
        """Drop a component's weights."""

    def told_in(self, info: ModelInfo) -> ModelInfo:
        """The info of a model, with what works for it."""
