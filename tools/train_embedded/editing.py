"""Edit functions the evaluation can score: any callable (image, mask, prompt, seed) -> image, or a batch of them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import FluxFillPipeline
from PIL import Image
from torch import Tensor, nn

from tools.train_embedded.layout import TEXT_TOKENS
from tools.train_embedded.masks import Mask
from tools.train_embedded.scenes import SIZE, Pixels

Edit = Callable[[Pixels, Mask, str, int], Pixels]
EditBatch = Callable[[Sequence[Pixels], Sequence[Mask], Sequence[str], Sequence[int]], list[Pixels]]


def one_by_one(edit: Edit) -> EditBatch:
    def run(
        images: Sequence[Pixels], masks: Sequence[Mask], prompts: Sequence[str], seeds: Sequence[int]
    ) -> list[Pixels]:
        return [edit(*each) for each in zip(images, masks, prompts, seeds, strict=True)]

    return run


def with_pipeline(pipeline: FluxFillPipeline, steps: int, batch: int = 10) -> EditBatch:
    """Edits through diffusers' own pipeline; pixels outside the mask are pasted back."""

    def run(
        images: Sequence[Pixels], masks: Sequence[Mask], prompts: Sequence[str], seeds: Sequence[int]
    ) -> list[Pixels]:
        edited: list[Pixels] = []
        for start in range(0, len(images), batch):
            part = slice(start, start + batch)
            out = pipeline(
                prompt=list(prompts[part]),
                image=[Image.fromarray(image) for image in images[part]],
                mask_image=[Image.fromarray(mask.astype(np.uint8) * 255) for mask in masks[part]],
                height=SIZE,
                width=SIZE,
                num_inference_steps=steps,
                guidance_scale=0.0,
                max_sequence_length=TEXT_TOKENS,
                generator=[torch.Generator().manual_seed(seed) for seed in seeds[part]],
            ).images
            pairs = zip(out, images[part], masks[part], strict=True)
            edited += [np.where(mask[..., None], np.asarray(new), old) for new, old, mask in pairs]
        return edited

    return run


class Guided(nn.Module):
    """A transformer with true classifier-free guidance at run time, to compare with the distilled one."""

    def __init__(self, pipeline: FluxFillPipeline, scale: float) -> None:
        super().__init__()
        self.inner = pipeline.transformer
        self.config, self.dtype, self.device = self.inner.config, self.inner.dtype, self.inner.device
        self._scale = scale
        words, pooled, _ = pipeline.encode_prompt([""], None, max_sequence_length=TEXT_TOKENS)
        self._words, self._pooled = words, pooled

    def forward(self, **kwargs: Any) -> tuple[Tensor]:
        size = len(kwargs["hidden_states"])
        asked = self.inner(**kwargs)[0]
        empty = {
            "encoder_hidden_states": self._words.expand(size, -1, -1),
            "pooled_projections": self._pooled.expand(size, -1),
        }
        free = self.inner(**{**kwargs, **empty})[0]
        return (free + self._scale * (asked - free),)
