"""Stencil's public interface: the server (`python -m entrypoints.serve`) and offline edits (`ImageEngine`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.run_class import RunClass
    from core.sampling_params import SamplingParams
    from entrypoints.control_picture import ControlPicture
    from entrypoints.image_engine import Edit, EditResult, ImageEngine

__all__ = ["ControlPicture", "Edit", "EditResult", "ImageEngine", "RunClass", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: the server begins to start its workers before it imports as much itself."""
    if name == "image_engine":
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from core import run_class, sampling_params

    offline = import_module(f"{__name__}.image_engine")
    places = {"RunClass": run_class, "SamplingParams": sampling_params}
    globals().update({each: getattr(places.get(each, offline), each) for each in __all__})
    return globals()[name]
