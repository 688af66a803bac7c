"""The two ways to run the edits of an evaluation: diffusers' pipeline, and the serving engine."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from diffusers import FluxFillPipeline
from PIL import Image

from entrypoints import Edit, ImageEngine, SamplingParams
from tools.train_embedded.layout import TEXT_TOKENS
from tools.train_embedded.masks import Mask
from tools.train_embedded.scenes import SIZE, Pixels

EditBatch = Callable[[Sequence[Pixels], Sequence[Mask], Sequence[str], Sequence[int]], list[Pixels]]


def with_pipeline(pipeline: FluxFillPipeline, steps: int, batch: int = 10) -> EditBatch:
    """Edit with diffusers' pipeline, and paste the original pixels back outside the mask."""

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


def with_engine(engine: ImageEngine, steps: int) -> EditBatch:
    """Edit with the serving engine, which batches and pastes back by itself."""

    def run(
        images: Sequence[Pixels], masks: Sequence[Mask], prompts: Sequence[str], seeds: Sequence[int]
    ) -> list[Pixels]:
        edits = [
            Edit(prompt=prompt, image=image, mask_image=mask.astype(np.uint8) * 255)
            for image, mask, prompt in zip(images, masks, prompts, strict=True)
        ]
        results = engine.generate(edits, [_exact(steps, seed) for seed in seeds])
        for result in results:
            if result.error is not None:
                raise result.error
        return [np.asarray(result.images[0]) for result in results]

    return run


def _exact(steps: int, seed: int) -> SamplingParams:
    """Sampling parameters for exact execution, so that only the model is evaluated."""
    return SamplingParams(num_inference_steps=steps, seed=seed, mask_aware=False)
