"""MaskFinder: finds masks with a segmenter, and keeps what was found and what the segmenter has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

Picture = tuple[str, str]
"""Content id and cache salt of a picture."""

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
    """One per segmenter of a worker. together: whether pictures share a pass: on a CPU that gains nothing, and the bits
    of a mask would depend on what is asked beside it."""

    def __init__(self, segmenter: Segmenter, *, together: bool) -> None:
        self._segmenter = segmenter
        self._together = together
        self._seen: ByteCache[Picture, Seen] = ByteCache(SEEN_BYTES)
        self._found: ByteCache[tuple[Picture, Selection], FoundMask] = ByteCache(FOUND_BYTES)
        self.num_seen = 0  # pictures that were encoded

    def find(self, asked: Sequence[Asked]) -> list[FoundMask]:
        """The masks, in order; pictures that no earlier call has seen are encoded together."""
        found = {key: self._found.get(key) for key in map(_key, asked)}
        missing = {key: each for key, each in zip(map(_key, asked), asked, strict=True) if found[key] is None}
        seen = self._look({picture: each.picture for (picture, _), each in missing.items()})
        for picture, selection in missing:
            found[picture, selection] = self._search(seen[picture], picture, selection)
        return [mask for each in asked if (mask := found[_key(each)]) is not None]

    def forget_pictures(self) -> None:
        """Free what the segmenter has seen, which only it can read."""
        self._seen = ByteCache(SEEN_BYTES)

    def _look(self, pictures: Mapping[Picture, Tensor]) -> dict[Picture, Seen]:
        known = {key: seen for key in pictures if (seen := self._seen.get(key)) is not None}
        unseen = [key for key in pictures if key not in known]
        for keys in [unseen] if self._together else [[key] for key in unseen]:
            if keys:
                known |= zip(keys, self._segmenter.look([pictures[key] for key in keys]), strict=True)
        for key in unseen:
            self._seen.put(key, known[key], known[key].nbytes)
        self.num_seen += len(unseen)
        return known

    def _search(self, seen: Seen, picture: Picture, selection: Selection) -> FoundMask:
        found = self._segmenter.find(seen, selection)
        result = FoundMask((found.shares >= LEAST_SHARE).cpu(), found.score)
        self._found.put((picture, selection), result, result.mask.nbytes)
        return result


def _key(asked: Asked) -> tuple[Picture, Selection]:
    return (asked.content_id, asked.cache_salt), asked.selection


def grown(mask: Tensor, by: int) -> Tensor:
    """The mask, bool [height, width], with all pixels at most `by` pixels beside or above or below one of it: grown by
    a square. In log2(by) passes over the picture."""
    for dim in (0, 1):
        mask = _grown_along(mask, min(by, mask.shape[dim]), dim)
    return mask


def _grown_along(mask: Tensor, by: int, dim: int) -> Tensor:
    side, window, covered = mask.shape[dim], 2 * by + 1, 1
    pad = (by, by, 0, 0) if dim == 1 else (0, 0, by, by)
    any_of = torch.nn.functional.pad(mask, pad)  # each entry stands for itself and the `covered` - 1 after it
    while covered < window:
        step = min(covered, window - covered)
        length = any_of.shape[dim] - step
        any_of = any_of.narrow(dim, 0, length) | any_of.narrow(dim, step, length)
        covered += step
    return any_of.narrow(dim, 0, side)


def active_tokens(mask: Tensor, margin: int, token_size: int) -> Tensor:
    """Indices of the tokens with a pixel at most `margin` from the mask, int32 [active tokens], row-major, ascending;
    as image processors find them for a mask that is given."""
    rows, columns = (side // token_size for side in mask.shape)
    cells = grown(mask, margin).view(rows, token_size, columns, token_size).any(dim=3).any(dim=1)
    return cells.flatten().nonzero()[:, 0].int()
