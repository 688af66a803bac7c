"""Runs a runner and diffusers' pipeline on the same checkpoint, with equal seed, steps and size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from edits import Edit, box_mask, picture
from PIL import Image

from core.config import AdapterConfig, ControlNetConfig, ModelConfig, Quantization
from core.ipc.shared_array import Arena, ArenaAllocator
from core.messages.worker import BatchResult, PageCopied, StepPlan
from model_executor.page_cache.page_store import PageStore
from model_executor.worker.loading.resident import ResidentModels
from model_executor.worker.ops.context import WorkerContext
from model_executor.worker.runner import Runner
from model_executor.worker.stores.tensor_store import TensorStore

MAX_DIFFERENCE = 1
"""Tolerance, of 255: our layers add numbers in another order, which may change a rounding."""

SAME = 0.999
"""Share of pixel values that must be equal."""

PROMPT = "a person wearing the red striped shirt, and more words than fit"


class Rig:
    """A runner with one model in this process, and diffusers' pipeline for the same checkpoint."""

    def __init__(
        self,
        checkpoint: Path,
        arena: Arena,
        pipeline: Any,
        adapters: Sequence[AdapterConfig] = (),
        quantization: Quantization = "none",
        in_bfloat16: bool = False,
        controlnets: Sequence[ControlNetConfig] = (),
        **parts: Any,
    ) -> None:
        """pipeline: its class. in_bfloat16: both compute in it, else in float32. parts: replace the checkpoint's parts
        in the pipeline."""
        self.arena = arena
        self.space = ArenaAllocator(arena)
        model = ModelConfig(
            model=str(checkpoint),
            served_model_name="tiny",
            dtype="bfloat16" if in_bfloat16 else "float32",
            quantization=quantization,
            adapters=tuple(adapters),
            controlnets=tuple(controlnets),
        )
        models = ResidentModels.open([model])
        models.load_all()
        for key in models.controlnets.keys:
            models.load(key)
        self.models = models
        self.store = TensorStore(0, models.device, arena)
        copied: list[PageCopied] = []
        self.pages = PageStore(models.device, arena, None, copied.append)
        context = WorkerContext(models.families, self.store, arena, self.pages, controlnets=models.controlnets.nets)
        self.runner = Runner(0, context)
        self.family = models.families["tiny"]
        if in_bfloat16:
            parts["dtype"] = torch.bfloat16
        self.pipeline = pipeline.from_pretrained(checkpoint, **parts)
        self.pipeline.set_progress_bar_config(disable=True)

    def edit(
        self, name: str, *, seed: int, steps: int, size: tuple[int, int], prompt: str = PROMPT, model: str = "tiny"
    ) -> Edit:
        return Edit(self.arena, self.space, name, seed=seed, steps=steps, size=size, prompt=prompt, model=model)

    def do(self, plan: StepPlan) -> list[BatchResult]:
        results = [self.runner.run(batch) for batch in plan.batches]
        for free in plan.free:
            self.store.free(free.key)
        assert [item.failure for result in results for item in result.items if item.failure] == []
        return results

    def run(self, edit: Edit) -> npt.NDArray[np.uint8]:
        """The edit alone, from start to end."""
        for plan in (edit.encode_plan(), *map(edit.denoise_plan, range(edit.num_steps)), edit.decode_plan()):
            self.do(plan)
        return edit.result()

    def run_together(self, edits: Sequence[Edit]) -> list[npt.NDArray[np.uint8]]:
        """Each edit joins one step later than the one before it, and leaves after its last step."""
        for edit in edits:
            self.do(edit.encode_plan())
        done, iteration = dict.fromkeys(edits, 0), 0
        while running := [edit for edit in edits[: iteration + 1] if done[edit] < edit.num_steps]:
            self.do(StepPlan(seq=0, batches=(Edit.denoise_batch(running, done),)))
            done |= {edit: done[edit] + 1 for edit in running}
            iteration += 1
        for edit in edits:
            self.do(edit.decode_plan())
        return [edit.result() for edit in edits]

    def assert_company_changes_nothing(
        self, edits: Sequence[Edit], expected: Callable[[Edit], npt.NDArray[np.uint8]]
    ) -> None:
        """Assert that edits run together give the same bytes as alone, and the expected pictures; and that nothing is
        left.
        """
        alone = [self.run(edit) for edit in edits]
        for edit, before, together in zip(edits, alone, self.run_together(edits), strict=True):
            assert np.array_equal(together, before)
            assert_same(together, expected(edit))
        assert len(self.store) == 0

    def expected(self, edit: Edit, **options: Any) -> npt.NDArray[np.uint8]:
        """The pipeline's picture. options: further arguments of the call, besides those common to all pipelines."""
        pixels: npt.NDArray[np.uint8] = np.asarray(self.images(edit, **options)[0])
        return pixels

    def images(self, edit: Edit, **options: Any) -> Any:
        """What the pipeline makes; as for `expected`."""
        width, height = edit.size
        generator = torch.Generator("cpu").manual_seed(edit.seed)
        # The pipelines pass none: noise that a sampler draws would come from the process's own generator.
        scheduler = self.pipeline.scheduler
        if "generator" in signature(type(scheduler).step).parameters:
            scheduler.step = partial(type(scheduler).step, scheduler, generator=generator)
        return self.pipeline(
            prompt=edit.prompt,
            image=Image.fromarray(picture(edit.seed, edit.upload_size)),
            mask_image=Image.fromarray(box_mask(edit.upload_size) * 255),
            width=width,
            height=height,
            num_inference_steps=edit.steps,
            guidance_scale=edit.guidance_scale,
            strength=edit.strength,
            max_sequence_length=16,
            generator=generator,
            **options,
        ).images


def assert_same(ours: npt.NDArray[np.uint8], theirs: npt.NDArray[np.uint8]) -> None:
    assert theirs.std() > 10, "a flat picture proves nothing"
    difference = np.abs(ours.astype(int) - theirs)
    assert difference.max() <= MAX_DIFFERENCE
    assert (difference == 0).mean() >= SAME, (difference == 0).mean()
