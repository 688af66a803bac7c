"""An engine that only records its calls, for tests of the HTTP side."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import fakes
import msgspec

from core.config import StencilConfig
from core.costs.load_report import EngineStats, LoadReport, StepSample
from core.errors import AdapterNotFoundError, ModelNotFoundError, OverloadedError, StencilError
from core.graph.workflow import Workflow
from core.lora import Lora
from core.model_choice import ModelChoice, choose_model
from core.model_info import ModelInfo
from core.patches import PatchSet
from core.run_class import RunClass
from engine.client.admission.not_ready import not_ready
from engine.client.edit_types import EditInput, EditReport, ImageOutput
from engine.client.resolve.bound_model import BoundModel
from engine.client.sessions.running_sessions import RunningSessions
from engine.client.sessions.upload_place import UploadPlace
from engine.client.templates.template_store import RegisteredTemplate, TemplateStore
from engine.client.upload import KeptUpload, Upload
from engine.observability.metrics import Metrics
from engine.router.engine_backend import MachineLink

MODEL = msgspec.structs.replace(fakes.MODEL, name="tiny/fill", native_size=64, max_text_tokens=32)
REPORT = EditReport(
    mask_ratio=0.25,
    active_tokens=4,
    image_tokens=16,
    text_tokens=7,
    prompt_truncated=False,
    unmasked=False,
    num_inference_steps=8,
    steps_computed=8,
    guidance_scale=None,
    ms={
        "queue": 1.0,
        "preprocess": 2.0,
        "encode": 3.0,
        "prime": 0.0,
        "denoise": 4.0,
        "decode": 5.0,
        "postprocess": 6.0,
    },
)


class FakeEngine:
    """Answers every edit with `payload` and registers every template. Raises `entering` at admission, and `failing`
    after the partial images.
    """

    def __init__(self, model: ModelInfo = MODEL, payload: bytes = b"\x89PNG not really") -> None:
        self.metrics = Metrics()
        self.config = StencilConfig(max_queue=4)
        self.models = {model.name: model}
        self.workflows: dict[str, Workflow] = {}
        self.is_ready = True
        self.is_closing = False
        self.payload = payload
        self.report = REPORT  # of every image; its template_id gets the image's index
        self.report_of: Callable[[int], EditReport] = self._own_report
        self.entering: Exception | None = None
        self.failing: Exception | None = None
        self.gate = asyncio.Event()  # outputs wait for it
        self.gate.set()
        self.edits: list[EditInput] = []
        self.choice: ModelChoice | None = None  # of the last edit
        self.files: dict[str, bytes] = {}  # content of the last edit's uploads
        self.num_open = 0
        self.failed_with: StencilError | None = None  # what the last edit's context was left with
        self.open_ids: list[str] = []  # of edits
        self.has_begun = True  # whether workers have begun those that are open
        self.brought: list[Workflow] = []
        self.templates = TemplateStore(1000)
        self.sessions = RunningSessions()
        self.primed_for: PatchSet = ()  # of the last template
        self.loaded: dict[str, tuple[str, str]] = {}  # adapter -> (path, model)
        self.begun: list[str] = []  # adapters that are loaded in the background
        self.loads: tuple[LoadReport | None, ...] = (None, None)
        self.stats: tuple[EngineStats | None, ...] = (None, None)
        self.recent_steps: tuple[tuple[StepSample, ...], ...] = ((), ())
        self.engines: tuple[int, ...] = (0, 1)
        self.links: tuple[MachineLink | None, ...] = (None, None)
        self.alive = (True, True)
        self.replicas: tuple[tuple[str, int], ...] = (("serving", 0), ("serving", 0))
        self.num_ranks: tuple[int, ...] = (1, 1)
        self.num_requests_running = 2
        self.num_requests_waiting = 1

    @property
    def last(self) -> EditInput:
        return self.edits[-1]

    @property
    def num_admitted(self) -> int:
        return self.num_open

    def until_shutdown(self) -> AbstractAsyncContextManager[None]:
        return self.sessions.until_shutdown()

    def check_upload(self, owner: str, uploads: Collection[UploadPlace]) -> None:
        if self.num_open + len(uploads) >= self.config.max_queue:
            self.metrics.observe_rejected("queue_full")
            raise OverloadedError("The queue is full.", retry_after=3.0)

    def check_ready(self) -> None:
        if not self.is_ready:
            self.metrics.observe_rejected("shutting_down" if self.is_closing else "not_ready")
            raise not_ready(is_closing=self.is_closing)

    def choose_model(self, name: str = "", loras: Sequence[Lora] = (), steps_without_lora: int = 0) -> ModelChoice:
        return choose_model(self.models, name, loras)

    @asynccontextmanager
    async def bring_workflow(self, choice: ModelChoice, workflow: Workflow) -> AsyncIterator[ModelChoice]:
        self.brought.append(workflow)
        yield replace(choice, model=msgspec.structs.replace(choice.model, workflow=workflow.name))

    @property
    def begun_edits(self) -> frozenset[str]:
        return frozenset(self.open_ids if self.has_begun else ())

    def workflow_of(self, model: ModelInfo) -> Workflow | None:
        return None

    @asynccontextmanager
    async def edit(
        self, request_id: str, edit: EditInput, choice: ModelChoice
    ) -> AsyncIterator[AsyncIterator[ImageOutput]]:
        if self.entering is not None:
            raise self.entering
        self.edits.append(edit)
        self.choice = choice
        references = [(f"reference {number}", upload) for number, upload in enumerate(edit.references)]
        controls = [(f"control {number}", each.picture) for number, each in enumerate(edit.controls)]
        for name, upload in (("image", edit.image), ("mask", edit.mask), *references, *controls):
            if upload is not None:
                self.files[name] = b"".join([chunk async for chunk in upload.chunks()])
                assert len(self.files[name]) == upload.size
        self.num_open += 1
        self.open_ids.append(request_id)
        try:
            yield self._outputs(edit)
        except StencilError as error:
            self.failed_with = error
            raise
        finally:
            self.num_open -= 1
            self.open_ids.remove(request_id)

    async def prime_template(
        self, request_id: str, image: Upload, *, model: str = "", loras: Sequence[Lora] = (), owner: str = ""
    ) -> RegisteredTemplate:
        choice = choose_model(self.models, model, loras)
        self.primed_for = choice.patches
        await self.gate.wait()
        template = RegisteredTemplate(
            upload=await KeptUpload.of(image),
            owner=owner,
            model=choice.model.name,
            width=48,
            height=32,
            image_tokens=6,
            created=1700000000,
            content_id="c",
            primed=True,
            page_bytes=4096,
        )
        self.templates.add(template)
        return template

    async def register_workflows(
        self, workflows: Sequence[Workflow], classes: Sequence[RunClass], bound: BoundModel
    ) -> None:
        self.bound = bound
        assert {name for workflow in workflows for name in workflow.class_names} <= {each.name for each in classes}
        self.workflows |= {workflow.title: workflow for workflow in workflows}

    def remove_workflow(self, name: str) -> None:
        if self.workflows.pop(name, None) is None:
            raise ModelNotFoundError(name)

    async def load_adapter(self, name: str, path: str, model: str = "") -> ModelInfo:
        info = msgspec.structs.replace(choose_model(self.models, model).model, name=name, parent=MODEL.name)
        self.loaded[name] = path, model
        return info

    def begin_adapter(self, name: str, path: str, model: str = "") -> ModelInfo:
        self.begun.append(name)
        return msgspec.structs.replace(choose_model(self.models, model).model, name=name, parent=MODEL.name)

    def unload_adapter(self, name: str) -> None:
        if name not in self.loaded:
            raise AdapterNotFoundError(name)
        del self.loaded[name]

    def delete_template(self, template_id: str, owner: str) -> None:
        self.templates.remove(template_id, owner)

    async def _outputs(self, edit: EditInput) -> AsyncIterator[ImageOutput]:
        for partial in range(edit.partial_images):
            for index in range(edit.sampling.n):
                yield self._image(edit, index, partial)
        await self.gate.wait()
        if self.failing is not None:
            raise self.failing
        for index in reversed(range(edit.sampling.n)):  # in no particular order
            yield self._image(edit, index, None)

    def _image(self, edit: EditInput, index: int, partial: int | None) -> ImageOutput:
        return ImageOutput(
            image_index=index,
            partial_index=partial,
            data=memoryview(base64.b64encode(self.payload) if edit.base64 else self.payload),
            width=48,
            height=32,
            seed=(edit.sampling.seed or 0) + index,
            report=self.report_of(index) if partial is None else None,
        )

    def _own_report(self, index: int) -> EditReport:
        template_id = self.report.template_id
        return replace(self.report, template_id=f"{template_id}-{index}" if template_id else None)
