"""Stencil's public interface: the server (`python -m entrypoints.serve`) and offline edits (`ImageEngine`)."""

from core.sampling_params import SamplingParams
from entrypoints.image_engine import Edit, EditResult, ImageEngine

__all__ = ["Edit", "EditResult", "ImageEngine", "SamplingParams"]
