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

    @classmethod
    def of(cls, text_lengths: Sequence[int], image_lengths: Sequence[int]) -> Packing:
        """The packing of requests with so many text and (active) image tokens each."""
        both = [t + i for t, i in zip(text_lengths, image_lengths, strict=True)]
        return cls(spans(text_lengths), spans(image_lengths), spans(both))

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
        texts, images = [], []
        for (t0, t1), (start, stop) in zip(self.text, self.joint, strict=True):
            texts.append(joint[start : start + t1 - t0])
            images.append(joint[start + t1 - t0 : stop])
        if len(texts) == 1:
            return texts[0], images[0]
        return torch.cat(texts), torch.cat(images)


def modulate_(x: Tensor, where: Sequence[Span], scale: Tensor, shift: Tensor) -> Tensor:
    """x * (1 + scale) + shift in place, request by request; x: [tokens, width], scale and shift: [requests, width]."""
    scale = 1 + scale
    for r, (start, stop) in enumerate(where):
        x[start:stop].mul_(scale[r]).add_(shift[r])
    return x


def gate_(x: Tensor, where: Sequence[Span], gate: Tensor) -> Tensor:
    """gate * x in place, request by request; x: [tokens, width], gate: [requests, width]."""
    for r, (start, stop) in enumerate(where):
        x[start:stop].mul_(gate[r])
    return x
