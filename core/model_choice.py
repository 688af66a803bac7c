"""Finds the served model that a request names. A model with an adapter counts as one, under the adapter's name."""

from __future__ import annotations

from collections.abc import Mapping

from core.errors import InvalidRequestError, ModelNotFoundError
from core.model_info import ModelInfo
from core.validation import check_choice


def choose_model(models: Mapping[str, ModelInfo], name: str, lora: str = "") -> ModelInfo:
    """The model `name` ("" = the first) with the adapter `lora` ("" = none); `name` may also be an adapter's. models:
    by name, at least one. Raises ModelNotFoundError; InvalidRequestError for an unknown adapter.
    """
    if name and name not in models:
        raise ModelNotFoundError(name)
    model = models[name] if name else next(iter(models.values()))
    if not lora or (lora == model.name and model.parent):
        return model
    adapters = [info.name for info in models.values() if info.parent == model.name]
    if not adapters:
        message = f"Invalid 'lora': '{model.name}' is served without adapters; the server is given them with --lora."
        raise InvalidRequestError(message, param="lora")
    check_choice("lora", lora, adapters)
    return models[lora]


def kin(models: Mapping[str, ModelInfo], name: str) -> list[str]:
    """The names of a model and all its adapters. name: of the model or of any of the adapters."""
    base = models[name].parent or name
    return [info.name for info in models.values() if base in (info.name, info.parent)]
