"""Sam3: finds all that words name, and what fills a box, with Segment Anything 3.

Nicolas Carion et al., SAM 3: Segment Anything with Concepts, arXiv 2511.16719.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.segmenters.files import read_config, read_tokenizer
from model_executor.segmenters.region import pool_region
from model_executor.segmenters.segmenter import BOX, WORDS, Box, Found, Seen, Segmenter, enlarge, nothing
from model_executor.segmenters.square import Square
from model_executor.segmenters.stand_in import with_children

THRESHOLD = 0.3
"""An instance with a higher score is found: the default of transformers' `post_process_instance_segmentation`."""

NO_WORDS = "visual"
"""The text that the model gets with a box alone."""


class Sam3(Segmenter):
    """A SAM 3. Words mean all their instances. A score is the surest instance's: the probability that the words mean
    it, times the probability that they mean anything in the picture.

    The model takes a box as an example, and finds all that is like it; what fills the box is the instance that overlaps
    it most. Points are not taken: they need the weights of its tracker, another model with an encoder of its own.
    """

    takes = frozenset({WORDS, BOX})

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        """Reads all files but weights. Raises ConfigError."""
        from transformers import CLIPTokenizer  # imported here: a server without this segmenter does not need it

        super().__init__({"segmenter": checkpoint})
        config = read_config(checkpoint)
        self._square = Square.of_checkpoint(checkpoint, config.vision_config.image_size)
        self._tokenizer = read_tokenizer(checkpoint, CLIPTokenizer, config)
        self._num_tokens = config.text_config.max_position_embeddings

    def look(self, pictures: Sequence[Tensor]) -> list[Seen]:
        """Runs the picture encoder over all pictures in one batch."""
        module = self._modules["segmenter"]
        pixels = self._square.prepare(pictures).to(module.device, module.dtype)
        levels = module.get_vision_features(pixels).fpn_hidden_states[:-1]  # the model does not read the last one
        return [
            Seen(tuple(level[i : i + 1].clone() for level in levels), *picture.shape[:2])
            for i, picture in enumerate(pictures)
        ]

    def _find_words(self, seen: Seen, words: str) -> Found:
        masks, _, scores = self._instances(self._modules["segmenter"], seen, words)
        shares = nothing(seen)
        for mask in masks:
            shares = torch.maximum(shares, enlarge(mask[None], seen)[0])
        return Found(shares, scores.max().item() if len(scores) else 0.0)

    def _find_box(self, seen: Seen, box: Box) -> Found:
        module, device = self._modules["segmenter"], seen.tensors[0].device
        wanted = torch.tensor([box], device=device)
        corners, size = wanted[:, :2], wanted[:, 2:] - wanted[:, :2]
        middle = torch.cat((corners + size / 2, size), dim=-1)[None].to(module.dtype)
        one = torch.ones(1, 1, dtype=torch.long, device=device)
        prompt = {"input_boxes": middle, "input_boxes_labels": one}
        masks, boxes, scores = self._instances(_with_boxes(module), seen, NO_WORDS, **prompt)
        overlaps = _overlaps(boxes, wanted)
        if not overlaps.any():
            return Found(nothing(seen), 0.0)
        best = overlaps.argmax()
        return Found(enlarge(masks[best][None], seen)[0], scores[best].item())

    def _instances(self, module: Any, seen: Seen, words: str, **prompt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The instances above the threshold: (shares [found, height, width] of the decoder's size, boxes [found, 4] as
        shares of the sides, scores [found]), all float32."""
        from transformers.models.sam3.modeling_sam3 import Sam3VisionEncoderOutput

        last = seen.tensors[-1]
        position = module.vision_encoder.neck.position_encoding(last.shape, last.device, last.dtype)
        # The model leaves the last entries out, and reads the position of the last level that is left alone.
        vision = Sam3VisionEncoderOutput(
            fpn_hidden_states=(*seen.tensors, last), fpn_position_encoding=(position, position)
        )
        out = module(vision_embeds=vision, **self._tokens(words).to(last.device), **prompt)
        scores = out.pred_logits[0].float().sigmoid() * out.presence_logits[0].float().sigmoid()
        found = scores > THRESHOLD
        return out.pred_masks[0][found].float().sigmoid(), out.pred_boxes[0][found].float(), scores[found]

    def _tokens(self, words: str) -> Any:
        options: dict[str, Any] = {"padding": "max_length", "truncation": True, "max_length": self._num_tokens}
        return self._tokenizer(words, return_tensors="pt", **options)


def _with_boxes(module: Any) -> Any:
    """A module that takes boxes without torchvision, which transformers pools their regions with."""
    encoder = copy.copy(module.geometry_encoder)
    encoder._encode_boxes = partial(_encode_boxes, encoder)
    return with_children(module, geometry_encoder=encoder)


def _encode_boxes(encoder: Any, boxes: Tensor, mask: Tensor, labels: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """`Sam3GeometryEncoder._encode_boxes` for one box of one picture: (its embedding [1, 1, width], its mask). boxes:
    [1, 1, 4], middle and size as shares. features: [1, width, height, width] of the picture."""
    x, y, width, height = boxes[0].unbind(-1)
    region = pool_region(features, boxes[0, 0], encoder.roi_size)
    embedded = encoder.boxes_direct_project(boxes)
    embedded = embedded + encoder.boxes_pool_project(region).view(1, 1, -1)
    embedded = embedded + encoder.boxes_pos_enc_project(encoder._encode_box_coordinates(x, y, width, height)[None])
    return encoder.label_embed(labels) + embedded, mask


def _overlaps(boxes: Tensor, box: Tensor) -> Tensor:
    """Intersections over unions of boxes [boxes, 4] with one [1, 4]: [boxes]."""
    inner = (torch.minimum(boxes[:, 2:], box[:, 2:]) - torch.maximum(boxes[:, :2], box[:, :2])).clamp(min=0).prod(-1)
    areas = [(each[:, 2:] - each[:, :2]).clamp(min=0).prod(-1) for each in (boxes, box)]
    return inner / (areas[0] + areas[1] - inner).clamp(min=1e-9)
