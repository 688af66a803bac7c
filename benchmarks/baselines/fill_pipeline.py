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

from PIL import Image, ImageOps


@dataclass(frozen=True)
class FillEdit:
    """One edit in diffusers' terms. image: RGB. mask: L, white = edit, of the image's size."""

    prompt: str
    image: Image.Image
    mask: Image.Image
    steps: int
    seed: int

    @classmethod
    def of_files(cls, prompt: str, image: bytes, mask: bytes, steps: int, seed: int) -> FillEdit:
        """mask: transparent = edit, as OpenAI's. Raises OSError for files that are not images."""
        with Image.open(io.BytesIO(image)) as upload, Image.open(io.BytesIO(mask)) as alpha:
            return cls(prompt, upload.convert("RGB"), ImageOps.invert(alpha.getchannel("A")), steps, seed)


class FillPipeline:
    """The pipeline; one thread at a time may call it. first_block_cache: threshold of diffusers' own step skipping (its
    maintained successor of TeaCache); None: every step is computed.
    """

    def __init__(self, model: str, dtype: str, threads: int, first_block_cache: float | None = None) -> None:
        # Imported here, since the parent of a pipeline's process needs no torch.
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

    def __call__(self, edits: Sequence[FillEdit], sigmas: list[float] | None = None) -> list[Image.Image]:
        """The pictures of edits of one size and number of steps, as the pipeline returns them, nothing pasted back.
        sigmas: the steps' noise levels, before the scheduler's shift; None: evenly spaced.
        """
        with self._cache_context():
            pictures: list[Image.Image] = self.pipeline(
                prompt=[edit.prompt for edit in edits],
                image=[edit.image for edit in edits],
                mask_image=[edit.mask for edit in edits],
                width=edits[0].image.width,
                height=edits[0].image.height,
                num_inference_steps=edits[0].steps,
                sigmas=sigmas,
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

    def _cache_context(self) -> AbstractContextManager[Any]:
        """FluxFillPipeline sets no cache context itself, unlike FluxPipeline; the hook needs one per call."""
        if not self._is_caching:
            return nullcontext()
        context: AbstractContextManager[Any] = self.pipeline.transformer.cache_context("fill")
        return context


_pipelines: list[FillPipeline] = []  # in the child process: the one that it loaded


@contextmanager
def pipeline_process(
    model: str, dtype: str, threads: int, first_block_cache: float | None = None
) -> Iterator[Executor]:
    """Runs `run_edits` in a process that has loaded the pipeline."""
    settings = (model, dtype, threads, first_block_cache)
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_load, initargs=settings) as process:
        yield process


def _load(model: str, dtype: str, threads: int, first_block_cache: float | None) -> None:
    _pipelines.append(FillPipeline(model, dtype, threads, first_block_cache))


def run_edits(edits: Sequence[FillEdit]) -> tuple[list[Image.Image], float]:
    """In that process: the pictures of edits made one by one, and seconds for all."""
    start = time.perf_counter()
    pictures = [_pipelines[0]([edit])[0] for edit in edits]
    return pictures, time.perf_counter() - start
