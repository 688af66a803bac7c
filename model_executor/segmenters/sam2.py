"""Sam2: finds what is at points or in a box with Segment Anything 2.

Nikhila Ravi et al., SAM 2: Segment Anything in Images and Videos, arXiv 2408.00714.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.selection import Point
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.segmenters.files import read_config
from model_executor.segmenters.segmenter import BOX, POINTS, Box, Found, Seen, Segmenter, enlarge, nothing
from model_executor.segmenters.square import Square

PROMPTS_AT_ONCE = 8
"""Prompts whose masks are made together: the decoder takes about 40 MB for each."""

LEVELS = 3
"""Tensors that SAM 2's decoder reads: two of high resolution, and the embedding."""


class Sam2(Segmenter):
    """A SAM 2 alone. A score is the overlap (intersection over union) with the truth that the model predicts for its
    mask.

    A single point may mean a thing, a part of it, or a part of that: of the model's three masks the one with the best
    score is taken. Several points and a box have one mask.
    """

    takes = frozenset({POINTS, BOX})

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        """Reads all files but weights. Raises ConfigError."""
        super().__init__({"segmenter": checkpoint})
        self._square = Square.of_checkpoint(checkpoint, read_config(checkpoint).prompt_encoder_config.image_size)

    def look(self, pictures: Sequence[Tensor]) -> list[Seen]:
        """Runs the picture encoder over all pictures in one batch."""
        module = self._modules["segmenter"]
        levels = module.get_image_embeddings(self._square.prepare(pictures).to(module.device, module.dtype))
        return [
            Seen(tuple(level[i : i + 1].clone() for level in levels), *picture.shape[:2])
            for i, picture in enumerate(pictures)
        ]

    def _find_points(self, seen: Seen, points: tuple[Point, ...]) -> Found:
        device = seen.tensors[0].device
        places = self._square.side * torch.tensor([[[[point.x, point.y] for point in points]]], device=device)
        signs = torch.tensor([[[int(point.adds) for point in points]]], device=device)
        logits, scores = self._decode(seen, len(points) == 1, input_points=places, input_labels=signs)
        return Found(enlarge(logits, seen)[0].sigmoid(), scores[0].item())

    def _find_each(self, seen: Seen, points: tuple[Point, ...]) -> Tensor:
        device, shares = seen.tensors[0].device, nothing(seen)
        places = self._square.side * torch.tensor([[[[point.x, point.y]] for point in points]], device=device)
        for some in places.split(PROMPTS_AT_ONCE, dim=1):
            signs = torch.ones(1, some.shape[1], 1, dtype=torch.long, device=device)
            logits, _ = self._decode(seen, True, input_points=some, input_labels=signs)
            shares = torch.maximum(shares, enlarge(logits, seen).sigmoid().amax(dim=0))
        return shares

    def _find_box(self, seen: Seen, box: Box) -> Found:
        logits, scores = self._find_boxes(seen, torch.tensor([box], device=seen.tensors[0].device))
        return Found(enlarge(logits, seen)[0].sigmoid(), scores[0].item())

    def _find_boxes(self, seen: Seen, boxes: Tensor) -> tuple[Tensor, Tensor]:
        """(float32 logits [boxes, height, width] of the decoder's size, scores [boxes]). boxes: [boxes, 4] shares."""
        return self._decode(seen, False, input_boxes=self._square.side * boxes[None])

    def _decode(self, seen: Seen, is_ambiguous: bool, **prompt: Any) -> tuple[Tensor, Tensor]:
        """The best mask of each prompt: (float32 logits [prompts, height, width], scores [prompts])."""
        module = self._modules["segmenter"]
        out = module(image_embeddings=list(seen.tensors[:LEVELS]), multimask_output=is_ambiguous, **prompt)
        best = out.iou_scores[0].argmax(dim=-1)
        prompts = torch.arange(len(best), device=best.device)
        return out.pred_masks[0, prompts, best].float(), out.iou_scores[0, prompts, best].float()
