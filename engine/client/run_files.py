"""Pictures that workflows of users' classes make, as encoded files: what `AsyncEngine.run_files` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from core.messages.image_processor import OutputFormat
from engine.client.run_values import RunValue


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEncoding:
    """How to encode the pictures that a run makes, as base64 text."""

    output_format: OutputFormat = "png"
    compression: int = 100  # 0..100, of jpeg and webp


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFile:
    """A picture that a run has made."""

    name: str  # of the result
    text: memoryview  # base64, in shared memory; valid until the run's context is left
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResults:
    """What a run has made."""

    pictures: tuple[PictureFile, ...]  # the result `picture` is the first, if there is one
    values: Mapping[str, RunValue]  # the other results, by name
