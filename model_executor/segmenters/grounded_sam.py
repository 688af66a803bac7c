"""GroundedSam: Grounding DINO finds boxes for words, and SAM 2 the mask of each.

Tianhe Ren et al., Grounded SAM: Assembling Open-World Models for Diverse Visual Tasks, arXiv 2401.14159.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.segmenters.detector import Detector
from model_executor.segmenters.sam2 import LEVELS, PROMPTS_AT_ONCE, Sam2
from model_executor.segmenters.segmenter import BOX, POINTS, WORDS, Found, Seen, enlarge, nothing


class GroundedSam(Sam2):
    """A Grounding DINO for words, and a SAM 2 for their boxes and for points and boxes of the user. The score of words
    is that of the surest box; the others are SAM 2's."""

    takes = frozenset({WORDS, POINTS, BOX})

    def __init__(self, detector: ModelCheckpoint, segmenter: ModelCheckpoint) -> None:
        """Reads all files but weights. Raises ConfigError."""
        super().__init__(segmenter)
        self.parts = {"segmenter": segmenter, "detector": detector}
        self._detector = Detector(detector)

    def look(self, pictures: Sequence[Tensor]) -> list[Seen]:
        """Runs both models' picture encoders."""
        features = self._detector.look(self._modules["detector"], pictures)
        pairs = zip(super().look(pictures), features, strict=True)
        return [replace(seen, tensors=(*seen.tensors, *each)) for seen, each in pairs]

    def _find_words(self, seen: Seen, words: str) -> Found:
        boxes, scores = self._detector.find(self._modules["detector"], seen.tensors[LEVELS:], words)
        shares = nothing(seen)
        for some in boxes.split(PROMPTS_AT_ONCE):
            if len(some):
                logits, _ = self._find_boxes(seen, some.to(shares.device))
                shares = torch.maximum(shares, enlarge(logits, seen).sigmoid().amax(dim=0))
        return Found(shares, scores.max().item() if len(scores) else 0.0)
