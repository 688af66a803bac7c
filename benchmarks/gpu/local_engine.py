"""An engine and its worker in this process: the real scheduler, runner and page store, without image processors."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from torch import nn

from benchmarks.gpu.graphs import GraphChoice, GraphSwitch
from core.config import CacheConfig, KernelChoice, ModelConfig, Offload, SchedulerConfig
from core.graph.workflows.inpaint import INPAINT
from core.handles import PAGE_ARENA, VALUE_ARENA, ArrayRef, Artefact, ModelKey
from core.ipc.shared_array import Arena, ArenaAllocator, carve
from core.messages.engine import EngineRequest, Finished
from core.messages.specs import EditSpec
from core.messages.worker import Batch, BatchResult, PageCopied, TransferDone
from core.sampling_params import SamplingParams
from core.scheduling.scheduler import StepScheduler
from core.scheduling.values.values import VALUE_BYTES
from engine.client.resolve.sampling_defaults import resolve
from engine.images.image_ops import content_id
from model_executor.models.base import Family
from model_executor.models.boxes import Box
from model_executor.page_cache.page_store import PageStore
from model_executor.worker.loading.resident import Read, ResidentModels, weight_bytes
from model_executor.worker.ops.context import WorkerContext
from model_executor.worker.runner import Runner
from model_executor.worker.stores.tensor_store import TensorStore

Pixels = npt.NDArray[np.uint8]

ARENA_BYTES = 2**30
MASKED_SHARE = 0.4
"""Side of the box that is edited, as a share of the picture's, unless a box is given."""


class LocalEngine:
    """One model."""

    def __init__(
        self,
        checkpoint: Path,
        device: str,
        dtype: str,
        cache: CacheConfig,
        watched: Callable[[Family], Family] = lambda family: family,
        kernels: KernelChoice = "auto",
        make: Callable[[str], nn.Module] | None = None,
        graphs: GraphChoice | None = None,
        offload: Offload = "none",
    ) -> None:
        """device, dtype, kernels, offload: as in ModelConfig. watched: wraps the model's family. make: makes a part's
        module, by its name in model_index.json, in place of reading its weights. graphs: whether steps may be CUDA
        graphs."""
        config = ModelConfig(
            model=str(checkpoint), served_model_name="checked", device=device, dtype=dtype, kernels=kernels
        )
        open_models = ResidentModels.open if offload == "none" else open_offloaded
        models = open_models([config], has_device_tier=bool(cache.device_bytes))
        models.load_all(read=None if make is None else _reader(models, make))
        ready = models.ready(0)
        (self.info,) = ready.models
        self.family = watched(models.families["checked"])
        self.graphs = GraphSwitch(_denoiser(self.family), graphs or GraphChoice())
        self.scheduler = StepScheduler(SchedulerConfig(), {self.info.name: self.info}, cache=cache)
        self.scheduler.learn((), [(0, ready.components)])
        values = Arena.create(VALUE_ARENA, VALUE_BYTES)
        self._arenas = Arenas(Arena.create(0, ARENA_BYTES), Arena.create(PAGE_ARENA, cache.host_bytes), values)
        self._space = ArenaAllocator(self._arenas.own)
        self._copied: queue.SimpleQueue[PageCopied] = queue.SimpleQueue()
        self._pages = PageStore(models.device, self._arenas.pages, None, self._copied.put)
        self._tensors = TensorStore(0, models.device, self._arenas)
        families = {"checked": self.family}
        self.runner = Runner(0, WorkerContext(families, self._tensors, self._arenas, self._pages))
        self._num_edits = 0
        self.prompt = "a red striped shirt"  # of the edits that follow

    def close(self) -> None:
        """End the page store's thread and free the arenas."""
        self._pages.close()
        self._arenas.close()

    def edit(self, templates: Sequence[Pixels], sampling: SamplingParams, box: Box | None = None) -> list[Pixels]:
        """Edit a box of each, together; uint8 [height, width, 3], sides multiples of a token's. box: in tokens; None:
        in the middle. Raises RuntimeError if an edit fails."""
        requests = [self.begin(template, sampling, box) for template in templates]
        left = {request.request_id for request in requests}
        while left:
            self.step()
            for output in self.scheduler.take_outputs():
                if not isinstance(output, Finished):
                    raise RuntimeError(f"an edit failed: {output}")
                left.discard(output.request_id)
        return [self._arenas.own.view(request.picture.pixels).copy() for request in requests]

    def begin(self, template: Pixels, sampling: SamplingParams, box: Box | None = None) -> EngineRequest:
        """Add an edit to the scheduler. box: as for `edit`."""
        request = self._request(template, self._mask(template, box), resolve(sampling, self.info))
        self.scheduler.add(request)
        return request

    def step(self) -> list[Batch]:
        """One iteration of the engine; returns the batches that ran."""
        plan = self.scheduler.schedule(time.monotonic())
        if plan is not None:
            for free in plan.free:
                self._tensors.free(free.key)
            self._pages.forget(each.key for each in plan.forget)
            for copy in plan.copies:
                self._pages.start(copy)
            for transfer in plan.transfers:
                self.scheduler.apply_transfer(TransferDone(0, self._tensors.export(transfer.ref)))
            for batch in plan.batches:
                self.scheduler.apply(self.run(batch))
        while not self._copied.empty():
            self.scheduler.apply_copy(self._copied.get())
        return list(plan.batches) if plan is not None else []

    def run(self, batch: Batch) -> BatchResult:
        """Run a batch as the worker does."""
        return self.runner.run(batch)

    def _mask(self, template: Pixels, box: Box | None) -> Pixels:
        """1 in the box that is edited, uint8 [height, width]."""
        (height, width), token = template.shape[:2], self.info.token_size
        if box is None:
            top, left = (int(side * (1 - MASKED_SHARE) / 2) for side in (height, width))
            right, bottom = width - left, height - top
        else:
            left, top, right, bottom = (token * edge for edge in box)
        mask = np.zeros((height, width), np.uint8)
        mask[top:bottom, left:right] = 1
        return mask

    def _request(self, template: Pixels, mask: Pixels, sampling: SamplingParams) -> EngineRequest:
        info, (height, width) = self.info, template.shape[:2]
        self._num_edits += 1
        tokens = mask.reshape(height // info.token_size, info.token_size, width // info.token_size, -1).any(axis=(1, 3))
        return EngineRequest(
            request_id=f"edit-{self._num_edits}",
            model=info.name,
            arrival=time.monotonic(),
            workflow=INPAINT.name,
            rounds=(info.num_steps(sampling),),
            spec=EditSpec(
                prompt=self.prompt,
                sampling=msgspec.structs.replace(sampling, full_steps=0),
                width=width,
                height=height,
                template=self._share(template),
                mask=self._share(mask),
                active=self._share(np.flatnonzero(tokens).astype(np.int32)),
                content_id=content_id(template),
                num_tokens=tokens.size,
                max_text_tokens=info.max_text_tokens,
                extra_text_tokens=info.text_tokens_beside(width, height),
                num_condition_tokens=info.num_condition_tokens(tokens.size, has_template=True),
                outputs={"picture": Artefact(self._share(np.zeros_like(template)))},
                is_mask_aware=sampling.mask_aware and info.page_scheme is not None,
            ),
        )

    def _share(self, array: npt.NDArray[np.generic]) -> ArrayRef:
        ref = carve(self._space.alloc(array.nbytes), 0, array.shape, array.dtype.name)
        self._arenas.own.view(ref)[...] = array
        return ref


def open_offloaded(configs: Sequence[ModelConfig], *, has_device_tier: bool = False) -> ResidentModels:
    """The models with text encoders and VAE in host memory, not loaded yet; also on a CPU, for which the flag is
    refused: weights are then copied from memory to memory."""
    models = ResidentModels.open(configs, has_device_tier=has_device_tier)
    models._checkpoints = {name: replace(each, offload="host") for name, each in models._checkpoints.items()}
    return models


def _reader(models: ResidentModels, make: Callable[[str], nn.Module]) -> Read:
    def read(key: ModelKey) -> tuple[nn.Module, int]:
        _, part = models.origin(key)
        module = make(part)
        return module, weight_bytes(module)

    return read


def _denoiser(family: Any) -> Any:
    """The denoiser of a family that is loaded."""
    return family._part(family.denoiser_part)


class Arenas:
    """The arenas of edits, pages and values, as a worker sees them."""

    def __init__(self, own: Arena, pages: Arena, values: Arena) -> None:
        self.own, self.pages = own, pages
        self._by_id = {arena.id: arena for arena in (own, pages, values)}

    def view(self, ref: ArrayRef) -> npt.NDArray[np.generic]:
        view: npt.NDArray[np.generic] = self._by_id[ref.arena].view(ref)
        return view

    def close(self) -> None:
        for arena in self._by_id.values():
            arena.close()
