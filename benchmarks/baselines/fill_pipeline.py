"""diffusers' own FluxFillPipeline: loaded and called as its documentation shows, one edit or a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from PIL import Image


@dataclass(frozen=True)
class FillEdit:
    """One edit in diffusers' words. image: RGB. mask: L, white = edit, of the image's size."""

    prompt: str
    image: Image.Image
    mask: Image.Image
    steps: int
    seed: int


class FillPipeline:
    """The pipeline, called from one thread at a time. first_block_cache: threshold of diffusers' own step skipping (its
    maintained successor of TeaCache); None: every step is computed.
    """

    def __init__(self, model: str, dtype: str, threads: int, first_block_cache: float | None = None) -> None:
        # The parent of a pipeline's process, and tests of what surrounds it, need no torch.
        import torch
        from diffusers import FirstBlockCacheConfig, FluxFillPipeline
        from diffusers.utils.logging import disable_progress_bar, set_verbosity_error
        from transformers.utils.logging import disable_progress_bar as disable_weights_progress_bar

        set_verbosity_error()  # a truncated prompt is truncated in every system
        disable_progress_bar()
        disable_weights_progress_bar()
        torch.set_num_threads(threads)
        self._torch = torch
        self.pipeline = FluxFillPipeline.from_pretrained(model, dtype=getattr(torch, dtype))
        self.pipeline.set_progress_bar_config(disable=True)
        self._text_length = min(512, self.pipeline.tokenizer_2.model_max_length)
        self._is_caching = first_block_cache is not None
        if first_block_cache is not None:
            self.pipeline.transformer.enable_cache(FirstBlockCacheConfig(threshold=first_block_cache))

    def __call__(self, edits: Sequence[FillEdit]) -> list[Image.Image]:
        """The pictures of edits of one size and number of steps, as the pipeline makes them: nothing is pasted back."""
        with self._cache_context():
            pictures: list[Image.Image] = self.pipeline(
                prompt=[edit.prompt for edit in edits],
                image=[edit.image for edit in edits],
                mask_image=[edit.mask for edit in edits],
                width=edits[0].image.width,
                height=edits[0].image.height,
                num_inference_steps=edits[0].steps,
                max_sequence_length=self._text_length,
                generator=[self._torch.Generator("cpu").manual_seed(edit.seed) for edit in edits],
            ).images
        return pictures

    def _cache_context(self) -> AbstractContextManager[Any]:
        """FluxFillPipeline names no cache context itself, as FluxPipeline does; one per call is what the hook needs."""
        if not self._is_caching:
            return nullcontext()
        context: AbstractContextManager[Any] = self.pipeline.transformer.cache_context("fill")
        return context
