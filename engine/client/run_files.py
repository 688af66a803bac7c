"""Pictures of workflows of users' classes as encoded files: what `AsyncEngine.run_files` takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.messages.image_processor import OutputFormat
from engine.client.run_values import RunValue
from engine.client.upload import Upload


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Pictures that a run is given as files, and how to encode those that it makes, as base64 text."""

    inputs: Mapping[str, Upload] = field(default_factory=dict)  # PNG, WebP or JPEG, by the input that takes it
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
