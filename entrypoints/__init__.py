"""Stencil's public interface: the server (`python -m entrypoints.serve`) and offline edits (`ImageEngine`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.sampling_params import SamplingParams
    from entrypoints.image_engine import Edit, EditResult, ImageEngine

__all__ = ["Edit", "EditResult", "ImageEngine", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: the server begins to start its workers before it imports as much itself."""
    if name == "image_engine":
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from core.sampling_params import SamplingParams
    from entrypoints.image_engine import Edit, EditResult, ImageEngine

    globals().update(Edit=Edit, EditResult=EditResult, ImageEngine=ImageEngine, SamplingParams=SamplingParams)
    return globals()[name]
