"""The interface of models that find the mask for words, points or a box in a picture.

A segmenter's modules are loaded and dropped by its caller, as those of a model family are. Its caller also turns
gradients off (`torch.inference_mode`) around `look` and `find`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from core.selection import Point, Selection
from model_executor.checkpoint.loader import ModelCheckpoint

WORDS, POINTS, BOX = "words", "points", "box"

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, as shares of a picture's sides."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the encoders made of one picture; several selections can be found in it. Its tensors share no memory with
    those of other pictures."""

    tensors: tuple[Tensor, ...]  # on the device, in the dtype of the weights; each begins with a dimension of 1
    height: int  # of the picture, in pixels
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Found:
    """The mask of a selection."""

    shares: Tensor  # float32 [height, width] in 0..1, on the device: the probability that a pixel is meant
    score: float  # 0..1: how sure the model is of its best match; 0 if it has none. Each class says what it measures


class Segmenter(ABC):
    """Finds masks with one or two loaded modules. Each checkpoint of `parts` has one part, which the caller loads with
    `load(ONE_PART)` and puts here."""

    takes: frozenset[str]  # of WORDS, POINTS and BOX

    def __init__(self, parts: Mapping[str, ModelCheckpoint]) -> None:
        """parts: "segmenter" and, if another model finds boxes for it, "detector"."""
        self.parts = parts
        self._modules: dict[str, Any] = {}

    def put(self, part: str, module: Any) -> None:
        """Put a loaded part in use. Raises KeyError for a part that the segmenter does not have."""
        self.parts[part]
        self._modules[part] = module

    def drop(self, part: str) -> None:
        """Stop using a part; its memory is freed once nothing else refers to it. Raises KeyError if it is not there."""
        del self._modules[part]

    @abstractmethod
    def look(self, pictures: Sequence[Tensor]) -> list[Seen]:
        """Run the encoders over pictures, all in one batch where the model allows it. pictures: uint8
        [height, width, 3] on the CPU, of any sizes."""

    def find(self, seen: Seen, selection: Selection) -> Found:
        """The mask of a selection, as `Selection` describes it. seen: from `look`.

        Masks are joined by the higher share of each pixel, and what is left out counts with 1 minus its share. Points
        that are given without words are one prompt of the model, with their signs. The score is that of the best mask
        that was joined. Raises ValueError for a kind of selection that is not in `takes`.
        """
        self._check(selection)
        adding = tuple(point for point in selection.points if point.adds)
        is_one_prompt = bool(adding) and not selection.words
        joined = []
        if selection.words:
            joined.append(self._find_words(seen, selection.words))
        if adding:
            joined.append(self._find_points(seen, selection.points if is_one_prompt else adding))
        limits = selection.box if joined else None
        if selection.box is not None and not joined:
            joined.append(self._find_box(seen, selection.box))
        shares = _union(seen, joined) * _inside(seen, limits)
        if not is_one_prompt:
            shares = self._leave_out(seen, shares, tuple(point for point in selection.points if not point.adds))
        return Found(shares, max((found.score for found in joined), default=0.0))

    def _check(self, selection: Selection) -> None:
        given = {WORDS: selection.words, POINTS: selection.points, BOX: selection.box}
        if unknown := sorted(kind for kind, value in given.items() if value and kind not in self.takes):
            raise ValueError(f"{type(self).__name__} takes no {' and no '.join(unknown)}")

    def _leave_out(self, seen: Seen, shares: Tensor, points: tuple[Point, ...]) -> Tensor:
        if not points or not shares.any():
            return shares
        return torch.minimum(shares, 1 - self._find_each(seen, points))

    def _find_each(self, seen: Seen, points: tuple[Point, ...]) -> Tensor:
        """The shares of what is at any of these points, each by itself."""
        targets = (msgspec.structs.replace(point, adds=True) for point in points)
        return _union(seen, (self._find_points(seen, (each,)) for each in targets))

    def _find_words(self, seen: Seen, words: str) -> Found:
        """What the words name."""
        raise NotImplementedError

    def _find_points(self, seen: Seen, points: tuple[Point, ...]) -> Found:
        """What is at the points that add, without what is at the others. At least one adds."""
        raise NotImplementedError

    def _find_box(self, seen: Seen, box: Box) -> Found:
        """What fills the box."""
        raise NotImplementedError


def nothing(seen: Seen) -> Tensor:
    """The shares of an empty mask."""
    return torch.zeros(seen.height, seen.width, device=seen.tensors[0].device)


def enlarge(maps: Tensor, seen: Seen) -> Tensor:
    """Resize maps to the picture's size, bilinearly and without antialiasing, as transformers' post-processing does.
    maps: [number, height, width]; the result is float32."""
    return torch.nn.functional.interpolate(maps[None].float(), (seen.height, seen.width), mode="bilinear")[0]


def _union(seen: Seen, joined: Iterable[Found]) -> Tensor:
    shares = nothing(seen)
    for found in joined:
        shares = torch.maximum(shares, found.shares)
    return shares


def _inside(seen: Seen, box: Box | None) -> Tensor:
    """1 for each pixel whose centre is in the box, else 0; float32 [height, width]. None: all are inside."""
    if box is None:
        return 1 + nothing(seen)
    left, top, right, bottom = box
    device = seen.tensors[0].device
    x = (torch.arange(seen.width, device=device) + 0.5) / seen.width
    y = (torch.arange(seen.height, device=device) + 0.5) / seen.height
    return ((y >= top) & (y <= bottom))[:, None] * ((x >= left) & (x <= right)).float()
