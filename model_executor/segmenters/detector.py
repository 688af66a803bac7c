"""Detector: finds boxes of what words name with Grounding DINO.

Shilong Liu et al., Grounding DINO: Marrying DINO with Grounded Pre-Training for Open-Set Object Detection, ECCV 2024.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.segmenters.files import read_config, read_image_processor, read_tokenizer
from model_executor.segmenters.stand_in import with_children

THRESHOLD = 0.25
"""A box with a higher score is found: the default of transformers' `post_process_grounded_object_detection`. Its
threshold for texts chooses the words of a box's label alone, so it has no use here."""


class Detector:
    """What turns pictures and words into the inputs of a Grounding DINO, and its outputs into boxes."""

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        """Reads all files but weights. Raises ConfigError."""
        # Imported here: a server without this segmenter does not need it.
        from transformers import BertTokenizer
        from transformers.models.grounding_dino.image_processing_pil_grounding_dino import (
            GroundingDinoImageProcessorPil,
        )

        self._processor = read_image_processor(checkpoint, GroundingDinoImageProcessorPil)
        config = read_config(checkpoint)
        self._tokenizer = read_tokenizer(checkpoint, BertTokenizer, config)
        self._max_tokens = config.max_text_len

    def look(self, module: Any, pictures: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """The backbone's feature maps of each picture. Pictures that are of one size once they are resized share a
        batch: padding would change what the backbone makes of the smaller ones."""
        prepared = [self._prepare(picture) for picture in pictures]
        alike = defaultdict[torch.Size, list[int]](list)
        for i, pixels in enumerate(prepared):
            alike[pixels.shape].append(i)
        seen: dict[int, tuple[Tensor, ...]] = {}
        for indices in alike.values():
            pixels = torch.cat([prepared[i] for i in indices]).to(module.device, module.dtype)
            features = module.model.backbone.conv_encoder.model(pixels).feature_maps
            seen |= {i: tuple(each[row : row + 1].clone() for each in features) for row, i in enumerate(indices)}
        return [seen[i] for i in range(len(pictures))]

    def _prepare(self, picture: Tensor) -> Tensor:
        """float32 [1, 3, height, width], resized."""
        options = {"input_data_format": "channels_last", "do_pad": False, "return_tensors": "pt"}
        pixels: Tensor = self._processor([picture.numpy()], **options)["pixel_values"]
        return pixels

    def find(self, module: Any, features: tuple[Tensor, ...], words: str) -> tuple[Tensor, Tensor]:
        """(boxes float32 [found, 4] as shares of the picture's sides: left, top, right, bottom; scores float32 [found]
        in 0..1). features: from `look`."""
        tokens = self._tokenizer(
            as_prompt(words), return_tensors="pt", truncation=True, max_length=self._max_tokens
        ).to(module.device)
        backbone = _SeenBackbone(features, module.model.backbone.position_embedding)
        inner = with_children(module.model, backbone=backbone)
        any_pixels = features[0].new_zeros(1, 3, 1, 1)  # the backbone has seen them
        out = with_children(module, model=inner)(pixel_values=any_pixels, **tokens)
        scores = out.logits[0].float().sigmoid().max(dim=-1).values
        x, y, width, height = out.pred_boxes[0].float()[scores > THRESHOLD].unbind(-1)
        boxes = torch.stack((x - width / 2, y - height / 2, x + width / 2, y + height / 2), dim=-1)
        return boxes, scores[scores > THRESHOLD]


def as_prompt(words: str) -> str:
    """Words as Grounding DINO was trained on them: lower case, and a full stop after each phrase."""
    text = words.strip().lower()
    return text if text.endswith(".") else f"{text}."


class _SeenBackbone(nn.Module):
    """Stands in for Grounding DINO's backbone, and returns what that has made of a picture."""

    def __init__(self, features: tuple[Tensor, ...], position_embedding: nn.Module) -> None:
        super().__init__()
        self._features = features
        self.position_embedding = position_embedding

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
        """(each feature map with its mask, where all is picture; their position embeddings), whatever the arguments."""
        masks = [torch.ones(1, *each.shape[-2:], dtype=torch.bool, device=each.device) for each in self._features]
        maps = list(zip(self._features, masks, strict=True))
        return maps, [self.position_embedding(each, mask).to(each.dtype) for each, mask in maps]
