"""Ragged packing: the tokens of all requests of a batch in one matrix, without padding and without masks.

joint   [text 0 | image 0 | text 1 | image 1 | ...]   one row per token; a request's tokens lie together, so its
                                                      attention reads views
text    [text 0 | text 1 | ...]                       what the text stream of a double block sees
image   [image 0 | image 1 | ...]                     likewise
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

Span = tuple[int, int]
"""First row and the row after the last."""


def spans(lengths: Iterable[int]) -> tuple[Span, ...]:
    """Back-to-back spans of these lengths, from row 0."""
    ends = list(accumulate(lengths))
    return tuple(zip([0, *ends[:-1]], ends, strict=True)) if ends else ()


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each request's rows lie in the three matrices; index r is the request's place in the batch."""

    text: tuple[Span, ...]
    image: tuple[Span, ...]
    joint: tuple[Span, ...]
    joint_text: tuple[Span, ...]
    joint_image: tuple[Span, ...]

    @classmethod
    def of(cls, text_lengths: Sequence[int], image_lengths: Sequence[int]) -> Packing:
        """The packing of requests with so many text and (active) image tokens each."""
        both = spans(length for pair in zip(text_lengths, image_lengths, strict=True) for length in pair)
        starts_and_ends = zip(both[::2], both[1::2], strict=True)
        joint = tuple((start, stop) for (start, _), (_, stop) in starts_and_ends)
        return cls(spans(text_lengths), spans(image_lengths), joint, both[::2], both[1::2])

    def join(self, text: Tensor, image: Tensor) -> Tensor:
        """text and image matrices -> joint matrix."""
        return torch.cat(
            [
                part
                for (t0, t1), (i0, i1) in zip(self.text, self.image, strict=True)
                for part in (text[t0:t1], image[i0:i1])
            ]
        )

    def split(self, joint: Tensor) -> tuple[Tensor, Tensor]:
        """joint matrix -> text and image matrices; views when there is one request."""
        return gather(joint, self.joint_text), gather(joint, self.joint_image)


def pieces(x: Tensor, where: Sequence[Span]) -> list[Tensor]:
    """Views of these rows of x."""
    if len(where) == 1 and where[0] == (0, len(x)):
        return [x]
    return [x[start:stop] for start, stop in where]


def gather(x: Tensor, where: Sequence[Span]) -> Tensor:
    """These rows of x, one span after the other; a view when there is one."""
    parts = pieces(x, where)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def norm_modulate(
    x: Tensor, where: Sequence[Span], eps: float, factor: Tensor, shift: Tensor, *, fused: bool
) -> Tensor:
    """Layer norm of these rows of x, times factor, plus shift, request by request: [rows, width], one span after the
    other. factor, shift: [requests, width].

    fused: in one pass, rounded less often than by diffusers. It took 0.4 of the time.
    """
    shape = x.shape[-1:]
    requests = zip(pieces(x, where), factor.unbind(), shift.unbind(), strict=True)
    if fused:
        parts = [F.layer_norm(piece, shape, weight, bias, eps) for piece, weight, bias in requests]
    else:
        parts = [F.layer_norm(piece, shape, eps=eps).mul_(weight).add_(bias) for piece, weight, bias in requests]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def add_gated_(x: Tensor, where: Sequence[Span], y: Tensor, gate: Tensor) -> None:
    """x += gate * y in place, request by request. y: what belongs to these rows of x, one span after the other; it is
    changed too. gate: [requests, width]."""
    changes = y.split([stop - start for start, stop in where])
    for piece, change, factor in zip(pieces(x, where), changes, gate.chunk(len(where)), strict=True):
        piece.add_(change.mul_(factor))
