"""MaskFinder: finds masks with a segmenter, and keeps what was found and what the segmenter has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.selection import Selection
from model_executor.segmenters.segmenter import Seen, Segmenter
from model_executor.worker.stores.byte_cache import ByteCache

SEEN_BYTES = 128 * 1024 * 1024
"""Of encoded pictures: SAM 2 makes about 16 MB of one."""

FOUND_BYTES = 32 * 1024 * 1024
"""Of masks: one of 1024x1024 pixels takes 1 MB."""

LEAST_SHARE = 0.5
"""The share, see `Found`, from which a pixel belongs to the mask."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A mask to find. picture: uint8 [height, width, 3]. content_id: identifies it. cache_salt: results are reused only
    with the same salt."""

    picture: Tensor
    content_id: str
    cache_salt: str
    selection: Selection


@dataclass(frozen=True, slots=True)
class FoundMask:
    """A mask, bool [height, width], on the CPU, which may have no pixel; and how sure the segmenter is, 0..1."""

    mask: Tensor
    score: float


class MaskFinder:
    """One per segmenter of a worker. together: whether pictures share a pass: on a CPU that gains nothing, and would
    have the bits of a mask depend on what is asked beside it."""

    def __init__(self, segmenter: Segmenter, *, together: bool) -> None:
        self._segmenter = segmenter
        self._together = together
        self._seen: ByteCache[tuple[str, str], Seen] = ByteCache(SEEN_BYTES)
        self._found: ByteCache[tuple[str, str, Selection], FoundMask] = ByteCache(FOUND_BYTES)

    def find(self, asked: Sequence[Asked]) -> list[FoundMask]:
        """The masks, in order; pictures that no earlier call has seen are encoded together."""
        found = [self._found.get((each.content_id, each.cache_salt, each.selection)) for each in asked]
        missing = [each for each, known in zip(asked, found, strict=True) if known is None]
        seen = self._look(missing)
        made = {id(each): self._search(each, seen[each.content_id, each.cache_salt]) for each in missing}
        return [known or made[id(each)] for each, known in zip(asked, found, strict=True)]

    def _look(self, asked: Sequence[Asked]) -> dict[tuple[str, str], Seen]:
        pictures = {(each.content_id, each.cache_salt): each.picture for each in asked}
        known = {key: seen for key in pictures if (seen := self._seen.get(key)) is not None}
        unseen = [key for key in pictures if key not in known]
        for keys in [unseen] if self._together else [[key] for key in unseen]:
            if keys:
                known |= zip(keys, self._segmenter.look([pictures[key] for key in keys]), strict=True)
        for key in unseen:
            self._seen.put(key, known[key], known[key].nbytes)
        return known

    def _search(self, asked: Asked, seen: Seen) -> FoundMask:
        found = self._segmenter.find(seen, asked.selection)
        result = FoundMask((found.shares >= LEAST_SHARE).cpu(), found.score)
        self._found.put((asked.content_id, asked.cache_salt, asked.selection), result, result.mask.nbytes)
        return result


def grown(mask: Tensor, by: int) -> Tensor:
    """The mask, bool [height, width], with all pixels at most `by` pixels beside or above or below one of it: grown by
    a square."""
    if not by:
        return mask
    pooled = mask[None, None].float()
    for kernel, padding in (((2 * by + 1, 1), (by, 0)), ((1, 2 * by + 1), (0, by))):
        pooled = _largest_around(pooled, kernel, padding)
    return pooled[0, 0] > 0


def _largest_around(picture: Tensor, kernel: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """max_pool2d with stride 1, whose own padding is limited to half a kernel."""
    padded = torch.nn.functional.pad(picture, (padding[1], padding[1], padding[0], padding[0]))
    return torch.nn.functional.max_pool2d(padded, kernel, stride=1)


def active_tokens(mask: Tensor, margin: int, token_size: int) -> Tensor:
    """Indices of the tokens with a pixel at most `margin` from the mask, int32 [active tokens], row-major, ascending;
    as image processors find them for a mask that is given."""
    cells = torch.nn.functional.max_pool2d(grown(mask, margin)[None, None].float(), token_size)
    return cells.flatten().nonzero()[:, 0].int()
