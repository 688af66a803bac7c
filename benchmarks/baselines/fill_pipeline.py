"""diffusers' own FluxFillPipeline, loaded and called as its documentation shows, one edit or a batch at a time.

`pipeline_process` runs it in a process of its own, with its own threads and memory. Edits and results are decoded
pictures, so file formats cost it no time.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
from PIL import Image, ImageOps


@dataclass(frozen=True)
class FillEdit:
    """One edit in diffusers' terms. image: RGB. mask: L, white = edit, of the image's size. computed: numbers of the
    steps that are computed, from 0 on; None: all. first_block_cache: threshold of diffusers' own step skipping (its
    maintained successor of TeaCache); None: no step skips blocks.
    """

    prompt: str
    image: Image.Image
    mask: Image.Image
    steps: int
    seed: int
    computed: tuple[int, ...] | None = None
    first_block_cache: float | None = None

    @classmethod
    def of_files(cls, prompt: str, image: bytes, mask: bytes, steps: int, seed: int, **skipping: Any) -> FillEdit:
        """mask: transparent = edit, as OpenAI's. skipping: computed, first_block_cache. Raises OSError for files that
        are not images.
        """
        with Image.open(io.BytesIO(image)) as upload, Image.open(io.BytesIO(mask)) as alpha:
            return cls(prompt, upload.convert("RGB"), ImageOps.invert(alpha.getchannel("A")), steps, seed, **skipping)

    @property
    def noise_levels(self) -> list[float]:
        """Of the computed steps, before the scheduler's shift: the pipeline's own ones."""
        levels = np.linspace(1.0, 1.0 / self.steps, self.steps)
        found: list[float] = (levels if self.computed is None else levels[list(self.computed)]).tolist()
        return found


class FillPipeline:
    """The pipeline; one thread at a time may call it."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        # Imported here, since the parent of a pipeline's process needs no torch.
        import torch
        from diffusers import FluxFillPipeline
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
        self._first_block_cache: float | None = None  # that the transformer has now

    def __call__(self, edits: Sequence[FillEdit]) -> list[Image.Image]:
        """The pictures of edits that are alike but for prompt, picture, mask and seed, as the pipeline returns them,
        nothing pasted back.
        """
        with self._caching(edits[0].first_block_cache):
            pictures: list[Image.Image] = self.pipeline(
                prompt=[edit.prompt for edit in edits],
                image=[edit.image for edit in edits],
                mask_image=[edit.mask for edit in edits],
                width=edits[0].image.width,
                height=edits[0].image.height,
                num_inference_steps=len(edits[0].noise_levels),
                sigmas=edits[0].noise_levels,
                max_sequence_length=self._text_length,
                generator=[self._torch.Generator("cpu").manual_seed(edit.seed) for edit in edits],
            ).images
        return pictures

    @contextmanager
    def counting_steps(self) -> Iterator[Callable[[], int]]:
        """Yields a function that returns how many steps have computed the last block since."""
        transformer = self.pipeline.transformer
        last = [*transformer.transformer_blocks, *transformer.single_transformer_blocks][-1]
        layer = next(module for module in last.modules() if isinstance(module, self._torch.nn.Linear))
        calls = list[None]()
        handle = layer.register_forward_hook(lambda *_: calls.append(None))
        try:
            yield lambda: len(calls)
        finally:
            handle.remove()

    def _caching(self, threshold: float | None) -> AbstractContextManager[Any]:
        """FluxFillPipeline sets no cache context itself, unlike FluxPipeline; the hook needs one per call."""
        from diffusers import FirstBlockCacheConfig

        transformer = self.pipeline.transformer
        if threshold != self._first_block_cache:
            if self._first_block_cache is not None:
                transformer.disable_cache()
            if threshold is not None:
                transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
            self._first_block_cache = threshold
        context: AbstractContextManager[Any] = nullcontext() if threshold is None else transformer.cache_context("fill")
        return context


_pipelines: list[FillPipeline] = []  # in the child process: the one that it loaded


@contextmanager
def pipeline_process(model: str, dtype: str, threads: int) -> Iterator[Executor]:
    """Runs `run_edits` in a process that has loaded the pipeline."""
    settings = (model, dtype, threads)
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_load, initargs=settings) as process:
        yield process


def _load(model: str, dtype: str, threads: int) -> None:
    _pipelines.append(FillPipeline(model, dtype, threads))


def run_edits(edits: Sequence[FillEdit]) -> tuple[list[Image.Image], float]:
    """In that process: the pictures of edits made one by one, and seconds for all."""
    start = time.perf_counter()
    pictures = [_pipelines[0]([edit])[0] for edit in edits]
    return pictures, time.perf_counter() - start
