"""The image work of one edit (decoding its uploads, encoding its results): the size and predicted time of its jobs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.costs.image_costs import ImageWork
from engine.client.edit_types import EditInput
from engine.client.upload import Upload


@dataclass(frozen=True, slots=True)
class ImageSeconds:
    """Predicted seconds of one image processor for an edit. prepare: its uploads. compose: one of its files. composes:
    all of its files, one after the other.
    """

    prepare: float
    compose: float
    composes: float


def prepare_work(files: Iterable[Upload | None], canvas_size: tuple[int, int] | None) -> ImageWork:
    """Size of preparing uploads that have not been decoded. canvas_size: (width, height) of an empty canvas, None if
    there is a picture, whose pixels are unknown and count as 0.
    """
    nbytes = sum(file.size for file in files if file is not None)
    return ImageWork("prepare", nbytes / 1e6, _megapixels(canvas_size))


def compose_work(edit: EditInput, upload_size: tuple[int, int] | None) -> ImageWork:
    """Size of making one file. upload_size: (width, height), None if not known yet."""
    output = _megapixels(edit.output_size or upload_size)
    return ImageWork(edit.output_format, _megapixels(upload_size), output)


def num_files(edit: EditInput) -> int:
    """Files that the edit makes at most, partial images included."""
    return edit.sampling.n * (1 + edit.partial_images)


def _megapixels(size: tuple[int, int] | None) -> float:
    return size[0] * size[1] / 1e6 if size else 0.0
