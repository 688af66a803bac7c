"""Makes the segmenter that checkpoints are for."""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import ConfigError
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.segmenters.clipseg import ClipSeg
from model_executor.segmenters.grounded_sam import GroundedSam
from model_executor.segmenters.sam2 import Sam2
from model_executor.segmenters.sam3 import Sam3
from model_executor.segmenters.segmenter import Segmenter


def make_segmenter(checkpoints: Sequence[ModelCheckpoint]) -> Segmenter:
    """The segmenter of one checkpoint, or of two in any order; reads all of their files but weights. Raises
    ConfigError."""
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.class_name)
    match [checkpoint.class_name for checkpoint in ordered]:
        case ["CLIPSegForImageSegmentation"]:
            return ClipSeg(*ordered)
        case ["Sam2Model"]:
            return Sam2(*ordered)
        case ["Sam3Model"]:
            return Sam3(*ordered)
        case ["GroundingDinoForObjectDetection" | "MMGroundingDinoForObjectDetection", "Sam2Model"]:
            return GroundedSam(*ordered)
    given = (
        " and ".join(f"{checkpoint.path} ({checkpoint.class_name})" for checkpoint in checkpoints) or "no checkpoint"
    )
    remedy = "give one of CLIPSeg, SAM 2 or SAM 3, or one of Grounding DINO and one of SAM 2"
    raise ConfigError(f"{given} makes no segmenter; {remedy}")
