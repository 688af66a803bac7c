"""Ragged packing: the tokens of all requests of a batch in one matrix, without padding and without masks.

joint   [text 0 | image 0 | text 1 | image 1 | ...]   one row per token; a request's tokens lie together, so its
                                                      attention reads views
text    [text 0 | text 1 | ...]                       input of a double block's text layers
image   [image 0 | image 1 | ...]                     input of its image layers
filled  [image 0 | image 1 | ...]                     each with the last text tokens, if these are fillers: tokens
                                                      that fill up the image to a number that a model asks for
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

Span = tuple[int, int]
"""(first row, row after the last)."""


def spans(lengths: Iterable[int]) -> tuple[Span, ...]:
    """Back-to-back spans of these lengths, from row 0."""
    ends = list(accumulate(lengths))
    return tuple(zip([0, *ends[:-1]], ends, strict=True)) if ends else ()


@dataclass(frozen=True, slots=True)
class Packing:
    """The spans of each request's rows in the four matrices, indexed by the request's position in the batch."""

    text: tuple[Span, ...]  # in the text matrix
    image: tuple[Span, ...]  # in the image matrix
    joint: tuple[Span, ...]  # in the joint matrix, text and image together
    joint_text: tuple[Span, ...]  # in the joint matrix, text alone
    joint_image: tuple[Span, ...]  # in the joint matrix, image alone
    filled: tuple[Span, ...]  # in the matrix of image tokens and their fillers
    joint_filled: tuple[Span, ...]  # in the joint matrix, image and fillers
    # Text alone and image alone, in parts with the same shift, scale and gate: one of each request, or two, see `of`.
    modulated_text: tuple[Span, ...]
    modulated_image: tuple[Span, ...]

    @classmethod
    def of(
        cls,
        text_lengths: Sequence[int],
        image_lengths: Sequence[int],
        fillers: Sequence[int] | None = None,
        apart: Sequence[int] | None = None,
    ) -> Packing:
        """The packing of requests with these numbers of text and (active) image tokens. fillers: how many of the text
        tokens, the last ones, fill up the image; None: none of any request. apart: how many of the image tokens, the
        last ones, have shifts, scales and gates of their own. Every request has two of each then, of which the second
        is of no text token. None: every request has one."""
        both = spans(length for pair in zip(text_lengths, image_lengths, strict=True) for length in pair)
        starts_and_ends = zip(both[::2], both[1::2], strict=True)
        joint = tuple((start, stop) for (start, _), (_, stop) in starts_and_ends)
        texts, images = both[::2], both[1::2]
        numbers = [0] * len(images) if fillers is None else fillers
        filled = tuple((start - number, stop) for (start, stop), number in zip(images, numbers, strict=True))
        alone = spans(stop - start for start, stop in filled)
        modulated = (texts, images) if apart is None else (_cut(texts, [0] * len(texts)), _cut(images, apart))
        return cls(spans(text_lengths), spans(image_lengths), joint, texts, images, alone, filled, *modulated)

    @property
    def fillers(self) -> list[int]:
        """How many text tokens of each request fill up its image."""
        return [image - filled for (image, _), (filled, _) in zip(self.joint_image, self.joint_filled, strict=True)]

    def join(self, text: Tensor, image: Tensor) -> Tensor:
        """Text and image matrices -> joint matrix."""
        return interleave([text, image], [self.text, self.image])


def _cut(where: Sequence[Span], lasts: Sequence[int]) -> tuple[Span, ...]:
    """Each span as two: all but its last so many rows, and those."""
    return tuple(
        part
        for (start, stop), last in zip(where, lasts, strict=True)
        for part in ((start, stop - last), (stop - last, stop))
    )


def interleave(matrices: Sequence[Tensor], where: Sequence[Sequence[Span]]) -> Tensor:
    """Rows of matrices with the same requests, one request after the other. where: of each matrix, spans as long as its
    requests' rows, which lie back to back."""
    parts = [
        matrix.split([stop - start for start, stop in spans]) for matrix, spans in zip(matrices, where, strict=True)
    ]
    return torch.cat([part for of_request in zip(*parts, strict=True) for part in of_request])


def together(parts: Sequence[Tensor]) -> Tensor:
    """The parts one below the other; one alone is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def pieces(x: Tensor, where: Sequence[Span]) -> list[Tensor]:
    """Views of these spans of x."""
    if len(where) == 1 and where[0] == (0, len(x)):
        return [x]
    return [x[start:stop] for start, stop in where]


def gather(x: Tensor, where: Sequence[Span]) -> Tensor:
    """These spans of x, one after the other; a view when there is one."""
    parts = pieces(x, where)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def norm_modulate(
    x: Tensor, where: Sequence[Span], eps: float, factor: Tensor, shift: Tensor, *, fused: bool
) -> Tensor:
    """Layer norm of each request's span of x, times factor, plus shift: [rows, width], one span after the other.
    factor, shift: [requests, width].

    fused: compute it in one pass, which rounds less often than diffusers and took 0.4 of the time.
    """
    shape = x.shape[-1:]
    requests = zip(pieces(x, where), factor.unbind(), shift.unbind(), strict=True)
    if fused:
        parts = [F.layer_norm(piece, shape, weight, bias, eps) for piece, weight, bias in requests]
    else:
        parts = [F.layer_norm(piece, shape, eps=eps).mul_(weight).add_(bias) for piece, weight, bias in requests]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rms_scales(x: Tensor, eps: float) -> Tensor:
    """What a root-mean-square norm multiplies each row of x, [rows, width], by: float32 [rows, 1]."""
    squares: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32).square_()
    return squares.div_(x.shape[1]).add_(eps).rsqrt_()


def rms_modulate(x: Tensor, where: Sequence[Span], eps: float, factor: Tensor) -> Tensor:
    """Root-mean-square norm of each request's span of x, times factor: [rows, width], one span after the other. factor:
    [requests, width]."""
    requests = zip(pieces(x, where), factor.unbind(), strict=True)
    return together([(piece * rms_scales(piece, eps)).mul_(weight).to(x.dtype) for piece, weight in requests])


def add_gated_(x: Tensor, where: Sequence[Span], y: Tensor, gate: Tensor) -> None:
    """x += gate * y in place, for each request's span of x. y: [rows, width], one span after the other; it is
    overwritten too. gate: [requests, width]."""
    changes = y.split([stop - start for start, stop in where])
    for piece, change, factor in zip(pieces(x, where), changes, gate.chunk(len(where)), strict=True):
        piece.add_(change.mul_(factor))
