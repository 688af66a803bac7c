"""An engine in one process: the client's preparation, a scheduler and a runner, without messages between them."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from core.config import EngineConfig, SchedulerConfig
from core.handles import NOWHERE, VALUE_ARENA, ArrayRef
from core.ipc.shared_array import Arena, ArenaAllocator, carve
from core.messages.engine import EngineRequest, Finished, PartialImage
from core.messages.image_processor import CanvasScale, PreparedCanvas, PreparedImages, PrepareImages
from core.messages.worker import Batch, TransferDone
from core.model_choice import ModelChoice
from core.sampling_params import SamplingParams
from core.scheduling.scheduler import StepScheduler
from core.scheduling.values.values import VALUE_BYTES
from engine.client.edit_types import EditInput
from engine.client.resolve.chosen_workflow import chosen_workflow
from engine.client.resolve.sampling_defaults import resolve
from engine.client.sessions.edit_requests import EditRequests
from engine.client.sessions.prepared_edit import PreparedEdit
from engine.images import image_ops
from model_executor.page_cache.page_store import PageStore
from model_executor.worker.loading.resident import ResidentModels
from model_executor.worker.ops.context import WorkerContext
from model_executor.worker.runner import Runner
from model_executor.worker.stores.tensor_store import TensorStore

Pixels = npt.NDArray[np.uint8]
Files = tuple[Pixels, Pixels]


class OneProcess:
    """Every token of every edit is computed. changes: model -> other values in fields of its info."""

    def __init__(self, models: ResidentModels, changes: Mapping[str, dict[str, object]] | None = None) -> None:
        ready, changes = models.ready(0), changes or {}
        infos = (msgspec.structs.replace(info, **changes.get(info.name, {})) for info in ready.models)
        self.infos = {info.name: info for info in infos}
        self.scheduler = StepScheduler(SchedulerConfig(), self.infos)
        self.scheduler.learn((), [(0, ready.components)])
        self._arenas = {0: Arena.create(0, 2**26), VALUE_ARENA: Arena.create(VALUE_ARENA, VALUE_BYTES)}
        self._space = ArenaAllocator(self._arenas[0])
        self._pages = PageStore(models.device, self._arenas[0], None, lambda copied: None)
        self._tensors = TensorStore(0, models.device, self)
        self._runner = Runner(0, WorkerContext(models.families, self._tensors, self, self._pages))
        self.batches: list[Batch] = []  # that were run

    def close(self) -> None:
        """End the page store's thread, and free the arenas."""
        self._pages.close()
        for arena in self._arenas.values():
            arena.close()

    def view(self, ref: ArrayRef) -> npt.NDArray[np.generic]:
        """An array in one of its arenas."""
        return self._arenas[ref.arena].view(ref)

    def request(
        self, name: str, model: str, sampling: SamplingParams, files: Files | None = None, side: int = 96
    ) -> EngineRequest:
        """As the client makes it. files: picture and mask; None: a generation. side: of the canvas, in pixels."""
        info, exact = self.infos[model], msgspec.structs.replace(sampling, mask_aware=False)
        edit, resolved = EditInput(prompt="a red hat", sampling=exact, partial_images=1), resolve(exact, info)
        workflow = chosen_workflow(info, resolved, None)
        scales = tuple(CanvasScale(each, resolved.number(factor), "") for each, factor in workflow.canvases.items())
        job = PrepareImages(0, None, None, "luminance", (side, side), 0, side, info.token_size, side**2, NOWHERE)
        job = msgspec.structs.replace(job, scales=scales)
        images = image_ops.prepare_nothing(job) if files is None else self._prepared(job, *files)
        prepared = PreparedEdit(edit, ModelChoice(info), resolved, images, EngineConfig(), workflow)
        requests = EditRequests(prepared, self._space.alloc)
        return requests.make(0, name, arrival=time.monotonic(), call_id=name, trace_context="")

    def alloc(self, nbytes: int) -> ArrayRef:
        """Memory that requests may name."""
        return self._space.alloc(nbytes)

    def run(self, *requests: EngineRequest) -> list[Pixels]:
        """The pictures of requests that come together. Their previews are made, too."""
        self.finish(*requests)
        return [self.view(request.spec.pixels).astype(np.uint8) for request in requests]

    def finish(self, *requests: EngineRequest) -> None:
        """Run requests that come together, whatever they make."""
        for request in requests:
            self.scheduler.add(request)
        left = {request.request_id for request in requests}
        while left:
            plan = self.scheduler.schedule(time.monotonic())
            assert plan is not None, "nothing goes on"
            for transfer in plan.transfers:
                self.scheduler.apply_transfer(TransferDone(0, self._tensors.export(transfer.ref)))
            for batch in plan.batches:
                self.batches.append(batch)
                self.scheduler.apply(self._runner.run(batch))
            for output in self.scheduler.take_outputs():
                assert isinstance(output, Finished | PartialImage), output
                left -= {output.request_id} if isinstance(output, Finished) else set()
        self.scheduler.check_integrity()

    def _prepared(self, job: PrepareImages, image: Pixels, mask: Pixels) -> PreparedImages:
        pixels, shown = (np.frombuffer(file, np.uint8) for file in (image, mask))
        arrays = image_ops.prepare(
            msgspec.structs.replace(job, image=NOWHERE, mask=NOWHERE, canvas_size=None), pixels, shown
        )
        canvases = {
            name: PreparedCanvas(*made.template.shape[1::-1], *self._shared(made))
            for name, made in arrays.canvases.items()
        }
        height, width, _ = arrays.template.shape
        refs = self._shared(arrays)
        facts = arrays.content_id, arrays.unmasked, arrays.crop, canvases
        return PreparedImages(0, *arrays.upload_size, width, height, *refs, *facts)

    def _shared(self, arrays: image_ops.CanvasArrays) -> list[ArrayRef]:
        return [self._share(array) for array in (arrays.template, arrays.mask, arrays.active)]

    def _share(self, array: npt.NDArray[np.generic]) -> ArrayRef:
        ref = carve(self._space.alloc(array.nbytes), 0, array.shape, array.dtype.name)
        self.view(ref)[...] = array
        return ref
