"""An engine in one process, from Stencil's own parts, as engines without image processors are built.

The StepScheduler plans, the worker's Runner computes, and the image processors' own code decodes, checks, pastes and
encodes, called between steps: denoising stands still meanwhile. Nothing travels between processes.
"""

from __future__ import annotations

import os
import queue
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.baselines.edit_app import Upload
from core.cache_folder import user_cache_folder
from core.config import CacheConfig, EngineConfig, ImageConfig, ModelConfig, SchedulerConfig
from core.handles import PAGE_ARENA, ArrayRef
from core.ipc.shared_array import Arena, ArenaAllocator
from core.messages.engine import EngineRequest, Finished
from core.messages.image_processor import ComposedImage, ComposeImage, PreparedImages, PrepareImages
from core.messages.worker import BatchResult, PageCopied
from core.model_info import ModelInfo
from core.sampling_params import SamplingParams
from core.scheduling.outputs import Output
from core.scheduling.scheduler import StepScheduler
from engine.client.edit_types import EditInput
from engine.client.mask_aware import resolve_margin
from engine.client.prepared_edit import PreparedEdit
from engine.client.sampling_defaults import resolve
from engine.images.image_codec import encoded_bytes
from engine.images.image_ops import scratch_bytes
from engine.images.image_processor import perform

ARENA_BYTES = 4 * 1024**3
COPY_SECONDS = 60.0
"""Within which a copy of pages has to end."""
MAX_PIXELS = ImageConfig().max_pixels
MAX_NUM_SEQS = SchedulerConfig().max_num_seqs
CACHE = CacheConfig()


class Model:
    """A loaded model and the scheduler over it, as in an engine and its worker. Runs in the calling thread.

    num_templates: how many templates of the model's native size memory holds; None: as `cache` says. denoised: when the
    last denoising batch ended, seconds of time.perf_counter; None where the last step had none.
    """

    def __init__(
        self, config: ModelConfig, arena: Arena, cache: CacheConfig, max_num_seqs: int, num_templates: int | None
    ) -> None:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(config.threads)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
        # Torch reads the number of threads when it is imported.
        from model_executor.page_cache.page_files import PageFiles
        from model_executor.page_cache.page_store import PageStore
        from model_executor.worker.cost_probe import known_or_probed
        from model_executor.worker.ops.context import WorkerContext
        from model_executor.worker.resident import ResidentModels, quiet_libraries, set_threads
        from model_executor.worker.runner import Runner
        from model_executor.worker.tensor_store import TensorStore

        set_threads(config.threads)
        quiet_libraries()
        models = ResidentModels.open([config])
        models.load_all()
        models.warm_up()
        infos = models.ready(0).models
        self.info = infos[0]
        self.denoised: float | None = None
        page_arena = Arena.create(PAGE_ARENA, cache.host_bytes)
        if num_templates is not None:
            cache = msgspec.structs.replace(cache, host_bytes=num_templates * _template_bytes(self.info))
        limits = SchedulerConfig(max_num_seqs=max_num_seqs)
        self.scheduler = StepScheduler(limits, {self.info.name: self.info}, cache=cache)
        kernels = {config.name: config.kernels}
        self.scheduler.learn(known_or_probed(models.families, infos, user_cache_folder(os.environ), kernels))
        self._store = TensorStore(0, models.device, arena)
        self._copied: queue.SimpleQueue[PageCopied] = queue.SimpleQueue()
        files = PageFiles(Path(cache.directory), cache.disk_bytes) if cache.disk_bytes else None
        self._pages = PageStore(models.device, page_arena, files, self._copied.put)
        self._runner = Runner(0, WorkerContext(models.families, self._store, arena, self._pages))

    def step(self) -> list[BatchResult]:
        """One iteration of the engine: what its batches came to. Waits for a copy where nothing can be computed."""
        plan, results = self.scheduler.schedule(time.monotonic()), list[BatchResult]()
        self.denoised = None
        if plan is not None:
            self._pages.forget(plan.forget)
            self._pages.delete(plan.delete)
            for copy in plan.copies:
                self._pages.start(copy)
            for batch in plan.batches:
                results.append(self._runner.run(batch))
                self.denoised = time.perf_counter() if batch.op == "denoise" else self.denoised
                self.scheduler.apply(results[-1])
            for key in plan.free:
                self._store.free(key)
        is_waiting = plan is None
        while is_waiting or not self._copied.empty():
            self.scheduler.apply_copy(self._copied.get(timeout=COPY_SECONDS))
            is_waiting = False
        return results


def _template_bytes(info: ModelInfo) -> int:
    assert info.page_scheme is not None
    tokens = info.num_image_tokens(info.native_size, info.native_size)
    return info.page_scheme.template_bytes(tokens, len(info.page_scheme.keyframes))


@dataclass(eq=False)
class InlineEdit:
    """One edit on its way. begun: its inference; decoded: the model's pixels are there; both in seconds of
    CLOCK_MONOTONIC. interruptions: how often its inference was paused for the image work of others, and for how many
    seconds in all. regions: the memory that it holds.
    """

    upload: Upload
    image: ArrayRef
    mask: ArrayRef
    regions: list[ArrayRef] = field(default_factory=list)
    upload_size: tuple[int, int] = (0, 0)
    request: EngineRequest | None = None
    mask_ratio: float = 0.0
    begun: float | None = None
    decoded: float | None = None
    interruptions: int = 0
    interrupted_seconds: float = 0.0


class RefusedUploadError(Exception):
    """The image code would not take it."""


class InlineEngine:
    """begin, step, end: the caller says in which order. One thing at a time."""

    def __init__(
        self,
        model: str,
        dtype: str,
        threads: int,
        cache: CacheConfig = CACHE,
        max_num_seqs: int = MAX_NUM_SEQS,
        num_templates: int | None = None,
    ) -> None:
        """cache, max_num_seqs, num_templates: see Model."""
        self.num_running = 0  # edits begun and not yet ended
        self._config = ModelConfig(model=model, dtype=dtype, threads=threads)
        self._arena = Arena.create(0, ARENA_BYTES)
        self._allocator = ArenaAllocator(self._arena)
        self._model = Model(self._config, self._arena, cache, max_num_seqs, num_templates)
        self._edits: dict[str, InlineEdit] = {}  # request id -> edit that the scheduler has
        self._num_requests = 0

    @property
    def scheduler(self) -> StepScheduler:
        return self._model.scheduler

    @property
    def denoised(self) -> float | None:
        """See Model."""
        return self._model.denoised

    def begin(self, upload: Upload, sampling: SamplingParams | None = None) -> InlineEdit:
        """Decode an upload, make what the model needs of it, and hand that to the scheduler. sampling: instead of the
        upload's own. Raises RefusedUploadError.
        """
        with self._image_work():
            regions: list[ArrayRef] = []
            image, mask = (self._store(file, regions) for file in (upload.image, upload.mask))
            edit = InlineEdit(upload, image, mask, regions)
            try:
                prepared = self._prepare(edit)
            except RefusedUploadError:
                self._free(edit)
                raise
            edit.upload_size = prepared.upload_width, prepared.upload_height
            edit.request = self._request(edit, prepared, sampling)
        self._edits[edit.request.request_id] = edit
        self._model.scheduler.add(edit.request)
        self.num_running += 1
        return edit

    def step(self) -> list[InlineEdit]:
        """One iteration; the edits whose pixels are there."""
        for result in self._model.step():
            for item in result.items:
                if (edit := self._edits.get(item.request_id)) is not None and edit.begun is None:  # not a priming job
                    edit.begun = result.started
        outputs = self._model.scheduler.take_outputs()
        return [self._finish(output) for output in outputs if output.request_id in self._edits]  # others were aborted

    def end(self, edit: InlineEdit) -> bytes:
        """Paste the pixels into the upload and encode the file: base64 of a PNG."""
        with self._image_work():
            file = self._compose(edit)
        self._free(edit)
        self.num_running -= 1
        return file

    def abort(self, edits: Iterable[InlineEdit]) -> None:
        """Give up edits that are not done."""
        ids = [edit.request.request_id for edit in edits if edit.request is not None]
        self.scheduler.abort(ids)
        for edit in map(self._edits.pop, ids):
            self._free(edit)
            self.num_running -= 1

    def _finish(self, output: Output) -> InlineEdit:
        if not isinstance(output, Finished):
            raise RuntimeError(f"an edit failed: {output}")
        edit = self._edits.pop(output.request_id)
        edit.decoded = time.monotonic()
        return edit

    @contextmanager
    def _image_work(self) -> Iterator[None]:
        """Every edit in inference waits for what happens here."""
        paused = [edit for edit in self._edits.values() if edit.begun is not None]
        start = time.monotonic()
        yield
        for edit in paused:
            edit.interruptions += 1
            edit.interrupted_seconds += time.monotonic() - start

    def _prepare(self, edit: InlineEdit) -> PreparedImages:
        info = self._model.info
        job = PrepareImages(
            job_id=0,
            image=edit.image,
            mask=edit.mask,
            mask_kind=edit.upload.mask_kind,
            canvas_size=None,
            mask_margin=resolve_margin(SamplingParams(), info),
            native_size=info.native_size,
            token_size=info.token_size,
            max_pixels=MAX_PIXELS,
            scratch=self._alloc(scratch_bytes(info.native_size, info.token_size), edit.regions),
        )
        answer = perform(self._arena, job)
        if not isinstance(answer, PreparedImages):
            raise RefusedUploadError(str(answer))
        return answer

    def _compose(self, edit: InlineEdit) -> bytes:
        assert edit.request is not None
        width, height = edit.upload_size
        job = ComposeImage(
            job_id=0,
            pixels=edit.request.spec.pixels[-1],
            image=edit.image,
            mask=edit.mask,
            mask_kind=edit.upload.mask_kind,
            canvas_size=None,
            output_size=None,
            output_format="png",
            compression=100,
            base64=True,
            max_pixels=MAX_PIXELS,
            out=self._alloc(encoded_bytes(width, height, 4, True, "png"), edit.regions),
        )
        answer = perform(self._arena, job)
        if not isinstance(answer, ComposedImage):
            raise RuntimeError(f"a result was not encoded: {answer}")
        return bytes(self._arena.view(answer.encoded).data)

    def _request(self, edit: InlineEdit, prepared: PreparedImages, asked_for: SamplingParams | None) -> EngineRequest:
        info, upload = self._model.info, edit.upload
        own = SamplingParams(num_inference_steps=upload.steps, seed=upload.seed)
        sampling = resolve(asked_for or own, info)
        asked, config = EditInput(prompt=upload.prompt, sampling=sampling), EngineConfig(models=(self._config,))
        resolved = PreparedEdit.of(asked, info, sampling, prepared, config)
        edit.mask_ratio = resolved.mask_ratio
        self._num_requests += 1
        return resolved.make_request(
            0,
            str(self._num_requests),
            lambda nbytes: self._alloc(nbytes, edit.regions),
            arrival=time.monotonic(),
            deadline=None,
            trace_context="",
        )

    def _store(self, file: bytes, regions: list[ArrayRef]) -> ArrayRef:
        ref = self._alloc(len(file), regions)
        self._arena.view(ref).data[:] = file
        return ref

    def _alloc(self, nbytes: int, regions: list[ArrayRef]) -> ArrayRef:
        regions.append(self._allocator.alloc(nbytes))
        return regions[-1]

    def _free(self, edit: InlineEdit) -> None:
        for region in edit.regions:
            self._allocator.free(region)
