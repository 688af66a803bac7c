"""Inputs of users' classes that a call is given as files, before they are decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.client.upload import Upload


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """A tensor whose bytes are in a file: little-endian, row by row."""

    dtype: str
    shape: tuple[int, ...]  # each side at least 0
    content: Upload


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFiles:
    """Files by the input that takes each; they are checked when they are read."""

    pictures: Mapping[str, Upload] = field(default_factory=dict)  # PNG, WebP or JPEG
    tensors: Mapping[str, TensorFile] = field(default_factory=dict)


NO_FILES = InputFiles()
"""Where all inputs are values."""
