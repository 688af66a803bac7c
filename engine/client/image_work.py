"""The image work of one edit: how large its jobs are, and what they are predicted to take."""

from __future__ import annotations

from dataclasses import dataclass

from core.costs.image_costs import ImageWork
from engine.client.edit_types import EditInput
from engine.client.upload import Upload


@dataclass(frozen=True, slots=True)
class ImageSeconds:
    """Predicted time of one image processor for an edit. prepare: its upload. compose: one file of its. composes: all
    its files, one after the other.
    """

    prepare: float
    compose: float
    composes: float


def prepare_work(upload: Upload | None, mask: Upload | None, canvas_size: tuple[int, int] | None) -> ImageWork:
    """Of an upload before it is read. canvas_size: (width, height) of an empty canvas, None where there is a picture.
    Only the size that was asked for is known: a picture counts as small.
    """
    nbytes = sum(file.size for file in (upload, mask) if file is not None)
    return ImageWork("prepare", nbytes / 1e6, _megapixels(canvas_size))


def compose_work(edit: EditInput, upload_size: tuple[int, int] | None) -> ImageWork:
    """Of one file. upload_size: (width, height), None while it is not known."""
    output = _megapixels(edit.output_size or upload_size)
    return ImageWork(edit.output_format, _megapixels(upload_size), output)


def num_files(edit: EditInput) -> int:
    """Files that it is predicted to make, partial images included."""
    return edit.sampling.n * (1 + edit.partial_images)


def _megapixels(size: tuple[int, int] | None) -> float:
    return size[0] * size[1] / 1e6 if size else 0.0
