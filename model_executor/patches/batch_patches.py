"""BatchPatches: which rows of a batch's matrices are changed by which patches, at which scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.patches import PatchSet
from model_executor.kernels.low_rank import Segment, Segments
from model_executor.kernels.ragged import Packing, Span


@dataclass(frozen=True, slots=True)
class Where:
    """The rows that patches change in the matrices of a packing."""

    text: Segments
    image: Segments
    joint: Segments
    filled: Segments


def by_patches(sets: Sequence[PatchSet]) -> list[int]:
    """Numbers of requests in an order in which those with the same patches follow one another: the fewer segments, the
    fewer products. Requests without come first."""
    return sorted(range(len(sets)), key=lambda number: [patch.id for patch in sets[number]])


class BatchPatches:
    """The patches of the requests in one pass; known once, and translated into rows of one matrix after the other."""

    def __init__(self, sets: Sequence[PatchSet], device: torch.device) -> None:
        """sets: of each request."""
        self._device = device
        self._users: dict[str, list[tuple[int, float]]] = {}  # patch -> (request's number, its scale), in order
        for number, patches in enumerate(sets):
            for patch in patches:
                self._users.setdefault(patch.id, []).append((number, patch.scale))

    def on(self, packing: Packing) -> Where:
        """The rows in the matrices of this packing."""
        return Where(*map(self.segments, (packing.text, packing.image, packing.joint, packing.filled)))

    def segments(self, spans: Sequence[Span]) -> Segments:
        """The rows in a matrix in which each request has this span."""
        return tuple(segment for patch in sorted(self._users) for segment in self._segments(patch, spans))

    def _segments(self, patch: str, spans: Sequence[Span]) -> Iterator[Segment]:
        """A segment for each run of spans that follow one another."""
        run: list[tuple[Span, float]] = []  # with their scales
        for number, scale in self._users[patch]:
            if run and run[-1][0][1] != spans[number][0]:
                yield self._segment(patch, run)
                run = []
            run.append((spans[number], scale))
        yield self._segment(patch, run)

    def _segment(self, patch: str, run: Sequence[tuple[Span, float]]) -> Segment:
        return Segment(patch, (run[0][0][0], run[-1][0][1]), self._scale(run))

    def _scale(self, run: Sequence[tuple[Span, float]]) -> Tensor | None:
        if all(scale == 1.0 for _, scale in run):
            return None
        return torch.cat([torch.full((stop - start,), scale, device=self._device) for (start, stop), scale in run])
