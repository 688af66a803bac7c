"""Canvases: the sizes of pictures that a workflow works at, by name."""

from __future__ import annotations

from core.graph.workflow import Number
from core.sampling_params import MAX_HIRES_SCALE, MIN_HIRES_SCALE
from entrypoints.workflows.connected import Connected
from entrypoints.workflows.request_fields import HIRES_SCALE

CANNOT_SCALE = f"give a number from {MIN_HIRES_SCALE:g} to {MAX_HIRES_SCALE:g}, or an input of the workflow"


def canvas_by_scale(connected: Connected) -> str:
    """The canvas so many times smaller as an input `scale` says: the request's, or a number; "": there is no such
    input. Raises ValueError for another number.
    """
    if "scale" in connected.given:
        return HIRES_SCALE.name
    if (scale := connected.literals.get("scale")) is None:
        return ""
    if isinstance(scale, bool | str) or not MIN_HIRES_SCALE <= scale <= MAX_HIRES_SCALE:
        raise ValueError(f"it is {scale!r:.80}; {CANNOT_SCALE}")
    return str(float(scale))


def scale_of(canvas: str) -> Number:
    """How many times smaller a canvas is."""
    return canvas if canvas == HIRES_SCALE.name else float(canvas)
