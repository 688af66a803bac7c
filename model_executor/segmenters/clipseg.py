"""ClipSeg: finds what words name with CLIPSeg, and what is at points or in a box among the things it is told of.

Timo Lüddecke and Alexander Ecker, Image Segmentation Using Text and Image Prompts, CVPR 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError
from core.selection import Point
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.segmenters.files import read_config, read_image_processor, read_things, read_tokenizer
from model_executor.segmenters.segmenter import BOX, POINTS, WORDS, Box, Found, Seen, Segmenter, enlarge, nothing


class ClipSeg(Segmenter):
    """A CLIPSeg. Its logits are resized to the picture before they become shares, so that edges stay sharp.

    With a things.json it takes points and boxes, too: a point means the first thing of the list that is there, with a
    share of at least one half, or else the one whose share is highest; so parts of other things are listed before them.
    A box means the thing whose mask has the bounding box that overlaps it most.

    A score is the highest share of a pixel for words, the share of the thing at the surest point for points, and for a
    box its overlap (intersection over union) with the thing's bounding box.
    """

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        """Reads all files but weights. Raises ConfigError."""
        # Imported here and below: a server without this segmenter does not need it.
        from transformers import CLIPTokenizer
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        super().__init__({"segmenter": checkpoint})
        self._processor = read_image_processor(checkpoint, ViTImageProcessorPil)
        config = read_config(checkpoint)
        self._tokenizer = read_tokenizer(checkpoint, CLIPTokenizer, config)
        self._max_tokens = config.text_config.max_position_embeddings
        self._things = read_things(checkpoint)
        self._last: tuple[Seen, Tensor] | None = None
        self.takes = frozenset({WORDS, POINTS, BOX} if self._things else {WORDS})
        size = self._processor.size
        if not size or size.height is None or size.height != size.width:
            raise ConfigError(f"{checkpoint.path} prepares pictures that are no squares, which CLIPSeg cannot read")

    def drop(self, part: str) -> None:
        super().drop(part)
        self._last = None

    def look(self, pictures: Sequence[Tensor]) -> list[Seen]:
        """Runs CLIP over all pictures in one batch, and keeps the hidden states that the decoder reads."""
        module = self._modules["segmenter"]
        arrays = [picture.numpy() for picture in pictures]
        pixels = self._processor(arrays, input_data_format="channels_last", return_tensors="pt")["pixel_values"]
        vision = module.clip.vision_model(pixels.to(module.device, module.dtype), output_hidden_states=True)
        kept = [vision.hidden_states[layer + 1] for layer in module.extract_layers]  # the first are the embeddings
        return [
            Seen(tuple(states[i : i + 1].clone() for states in kept), *picture.shape[:2])
            for i, picture in enumerate(pictures)
        ]

    def _find_words(self, seen: Seen, words: str) -> Found:
        shares = enlarge(self._logits(seen, [words]), seen)[0].sigmoid()
        return Found(shares, shares.max().item())

    def _find_points(self, seen: Seen, points: tuple[Point, ...]) -> Found:
        logits = self._logits_of_things(seen)
        there = _at(logits, points)  # [things, points]
        joined, score = nothing(seen), 0.0
        chosen = [_first_there(each) for each in there.unbind(dim=1)]
        for point, thing, logit in zip(points, chosen, there.T, strict=True):
            if point.adds:
                joined = torch.maximum(joined, enlarge(logits[thing : thing + 1], seen)[0].sigmoid())
                score = max(score, logit[thing].sigmoid().item())
        for point, thing in zip(points, chosen, strict=True):
            if not point.adds:
                joined = torch.minimum(joined, (-enlarge(logits[thing : thing + 1], seen)[0]).sigmoid())
        return Found(joined, score)

    def _find_box(self, seen: Seen, box: Box) -> Found:
        logits = self._logits_of_things(seen)
        overlaps = [_overlap(box, _bounds(each >= 0)) for each in logits]
        best = max(range(len(overlaps)), key=overlaps.__getitem__)
        if not overlaps[best]:
            return Found(nothing(seen), 0.0)
        return Found(enlarge(logits[best : best + 1], seen)[0].sigmoid(), overlaps[best])

    def _logits_of_things(self, seen: Seen) -> Tensor:
        """Logits of all things, kept for the next click on the same picture: float32 [things, side, side]."""
        if self._last is None or self._last[0] is not seen:
            self._last = seen, self._logits(seen, self._things)
        return self._last[1]

    def _logits(self, seen: Seen, texts: Sequence[str]) -> Tensor:
        """Logits of all texts, float32 [texts, side, side]."""
        module: Any = self._modules["segmenter"]
        options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": self._max_tokens}
        tokens = self._tokenizer(list(texts), return_tensors="pt", **options).to(module.device)
        meanings = module.clip.get_text_features(tokens.input_ids, tokens.attention_mask).pooler_output
        states = tuple(each.expand(len(texts), -1, -1) for each in seen.tensors)
        logits: Tensor = module.decoder(states, meanings).logits
        return logits.float()


def _first_there(logits: Tensor) -> int:
    """The first thing that is at a point, or else the likeliest. logits: [things], at the point."""
    there = (logits >= 0).nonzero()
    return int(there[0] if len(there) else logits.argmax())


def _at(logits: Tensor, points: Sequence[Point]) -> Tensor:
    """Logits at points, as if they were resized to a picture of endless resolution; [maps, points]."""
    places = torch.tensor([[point.x, point.y] for point in points], device=logits.device)
    grid = (2 * places - 1)[None, None]
    sampled = torch.nn.functional.grid_sample(logits[None], grid, padding_mode="border", align_corners=False)
    return sampled[0, :, 0]


def _bounds(mask: Tensor) -> Box | None:
    """The bounding box of a mask [height, width], as shares of its sides; None for an empty mask."""
    rows, columns = mask.any(dim=1).nonzero(), mask.any(dim=0).nonzero()
    if not len(rows):
        return None
    height, width = mask.shape
    top, bottom = rows[0].item() / height, (rows[-1].item() + 1) / height
    return columns[0].item() / width, top, (columns[-1].item() + 1) / width, bottom


def _overlap(one: Box, other: Box | None) -> float:
    """Intersection over union of two boxes, 0..1."""
    if other is None:
        return 0.0
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    return width * height / (_area(one) + _area(other) - width * height)


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
