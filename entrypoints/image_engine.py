"""ImageEngine: offline edits without a server: `ImageEngine().generate([Edit(...), ...], SamplingParams(...))`

Workflows of users' classes run likewise: `generate([{"image": photo}], model="their name")`.

A blocking wrapper around the AsyncEngine that the server uses, whose event loop runs in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar, cast

import msgspec
import uvloop
from PIL import Image
from tqdm import tqdm

from core.config import (
    EMBEDDED_MODEL,
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    ImageConfig,
    ModelConfig,
    Offload,
    Quantization,
    SchedulerConfig,
    StencilConfig,
)
from core.errors import EngineError, InvalidRequestError, StencilError
from core.graph.workflow import Workflow
from core.lora import Lora, named_loras
from core.mask_request import MaskRequest, mask_request
from core.model_info import ModelInfo
from core.run_class import RunClass
from core.sampling_params import MAX_PADDING_MASK_CROP, MAX_PROMPT_CHARACTERS, MAX_SIDE, MIN_SIDE, SamplingParams
from core.skip_level import SkipLevel
from core.validation import check_filled, check_integer, check_length, conform, conformed
from engine.client.async_engine import AsyncEngine
from engine.client.control_input import ControlInput
from engine.client.edit_types import EditInput, EditReport
from engine.client.input_files import NO_FILES, InputFiles
from engine.client.run_input import RunInput
from engine.client.run_values import RunValue
from engine.client.templates.template_store import RegisteredTemplate
from engine.client.upload import BytesUpload
from entrypoints.class_inputs import ClassInput, class_inputs
from entrypoints.control_picture import ControlPicture
from entrypoints.pictures import ImageLike, decode_picture, encode_picture
from entrypoints.workflows.registered import Registered
from entrypoints.workflows.workflow_files import read_workflows

logger = logging.getLogger("stencil.offline")

T = TypeVar("T")
_CACHE = CacheConfig()
_NO_ADAPTERS: Mapping[str, str | Path] = MappingProxyType({})
MAX_IN_FLIGHT = 64
"""Edits in flight per engine: enough to keep any batch full, and a bound on their memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One edit, or a generation if there is neither an image nor a template. Give at most one of the two masks; without
    a mask, the image's transparent area is edited, or if it has none, all of it.

    Photos are turned upright by their EXIF orientation, both as files and as PIL images.

    Raises InvalidRequestError for a value of the wrong type or out of range. Pictures are only checked when the edit
    runs.
    """

    prompt: str = ""  # what to paint; may be empty with models that make pictures of a class
    class_label: int | str | None = None  # which class, by number or name; None: the prompt is its name
    image: ImageLike | None = None
    references: Sequence[ImageLike] = ()  # further pictures to look at, for models that see them
    controls: Sequence[ControlPicture] = ()  # pictures that steer the steps, for models with ControlNets
    mask: ImageLike | None = None  # transparent = edit, as in OpenAI's API
    mask_image: ImageLike | None = None  # white = edit, as in diffusers
    # Instead of a mask, what to find: in words, by points (x, y and 1, or -1 for what to leave out), or by a box (left,
    # top, right, bottom), all in pixels of the picture. Needs a segmenter, see ModelConfig.
    mask_prompt: str | None = None
    mask_points: tuple[tuple[float, ...], ...] = ()
    mask_box: tuple[float, float, float, float] | None = None
    mask_grow: int = 0  # px, 0..1024: grow the mask on each side
    mask_feather: float = 0.0  # px, 0..256: soften its edge by a Gaussian with this deviation
    size: tuple[int, int] | None = None  # of the result: width, height, 16..4096 px; a generation's default: native
    template_id: str | None = None  # from ImageEngine.create_template; instead of an image
    padding_mask_crop: int | None = None  # px, 0..65535: edit the mask's box, grown by this, at the model's resolution
    # That the model's workflow declares for users' classes, by name; pictures also as ImageLike.
    inputs: Mapping[str, ClassInput] = field(default_factory=dict, hash=False)
    model: str = ""  # name of one of the engine's models; "" = that of the call, or the first
    lora: str | Lora | Sequence[str | Lora] = ""  # this model's adapters to use, by name, or with a scale each

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora", named_loras(self.lora))
        object.__setattr__(self, "references", _references(self.references))
        controls = conformed("controls", self.controls, Sequence)
        object.__setattr__(self, "controls", tuple(conformed("controls", each, ControlPicture) for each in controls))
        conform(self)
        if self.class_label is None:
            check_filled("prompt", self.prompt)
        check_length("prompt", self.prompt, MAX_PROMPT_CHARACTERS)
        for side in self.size or ():
            check_integer("size", side, MIN_SIDE, MAX_SIDE)
        if self.padding_mask_crop is not None:
            check_integer("padding_mask_crop", self.padding_mask_crop, 0, MAX_PADDING_MASK_CROP)
        self.to_mask_request()
        if self.mask is not None and self.mask_image is not None:
            raise InvalidRequestError("Give either 'mask' or 'mask_image', not both.", param="mask")
        if self.image is not None and self.template_id is not None:
            raise InvalidRequestError("Give either 'image' or 'template_id', not both.", param="template_id")

    def to_mask_request(self) -> MaskRequest | None:
        """The mask to find; None: none. Raises InvalidRequestError."""
        return mask_request(self.mask_prompt, self.mask_points, self.mask_box)


@dataclass(frozen=True, slots=True, kw_only=True)
class EditResult:
    """The result of one Edit: its images, `SamplingParams.n` of them, or an error. Of a workflow of users' classes
    alone: its results, pictures among them as uint8 [height, width, 3], and these as images, `picture` first.
    """

    images: list[Image.Image] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)  # one per image of an Edit
    reports: list[EditReport] = field(default_factory=list)  # one per image of an Edit
    values: Mapping[str, RunValue] = field(default_factory=dict)  # that users' classes made, for an Edit's first image
    error: StencilError | None = None


class ImageEngine:
    """Loaded models, ready to edit. Use it as a context manager, or call `close`.

    model: diffusers directory or hub id; default: the embedded model. models: several models, each with settings of its
    own, instead of `model` and all other arguments up to `segmenter`; `Edit.model` names one of them. model_bytes:
    weights that each worker may hold, see SchedulerConfig. variant, dtype, quantization, device, offload, threads,
    mask_aware, cache_keyframes, cache_dtype, priming_prompt, segmenter: see ModelConfig. loras: name -> file of each
    adapter, see AdapterConfig. cache: see CacheConfig. approximate_cache_bytes, skip_levels: see StencilConfig.
    data_parallel_size: number of engines, between which edits are distributed. workers_per_engine: ranks of each, the
    last of which decodes. degree: ranks that compute each denoising step together. workflows: files or folders of
    users, see `entrypoints.workflows`, or graphs of `classes`: to name as `model` of `generate`, or as
    ModelConfig.workflow.
    Raises InvalidRequestError for an argument of the wrong type or out of range, and ConfigError if a model, an
    adapter, a class or a workflow cannot be used.

    Usable only in the process that created it, since a forked child has neither its thread nor its child processes.
    Methods raise EngineError in a fork and after `close`.
    """

    def __init__(
        self,
        model: str = EMBEDDED_MODEL,
        *,
        variant: str = "",
        dtype: str = "auto",
        quantization: Quantization = "none",
        device: str = "auto",
        offload: Offload = "none",
        threads: int = 0,
        mask_aware: bool = True,
        cache_keyframes: str = "auto",
        cache_dtype: str = "auto",
        priming_prompt: str = "",
        loras: Mapping[str, str | Path] = _NO_ADAPTERS,
        segmenter: str | Sequence[str] = (),
        models: Sequence[ModelConfig] = (),
        model_bytes: int = SchedulerConfig().model_bytes,
        cache: CacheConfig = _CACHE,
        approximate_cache_bytes: int = StencilConfig().approximate_cache_bytes,
        skip_levels: Sequence[SkipLevel] | None = None,
        max_num_seqs: int = SchedulerConfig().max_num_seqs,
        image_workers: int = ImageConfig().image_workers,
        data_parallel_size: int = EngineConfig().data_parallel_size,
        workers_per_engine: int = EngineConfig().workers_per_engine,
        degree: int = SchedulerConfig().degree,
        classes: Sequence[RunClass] = (),
        workflows: str | Path | Sequence[Workflow | str | Path] = (),
    ) -> None:
        only = ModelConfig(
            model=model,
            variant=variant,
            dtype=dtype,
            quantization=quantization,
            device=device,
            offload=offload,
            threads=threads,
            mask_aware=mask_aware,
            cache_keyframes=cache_keyframes,
            cache_dtype=cache_dtype,
            priming_prompt=priming_prompt,
            adapters=_adapters(loras),
            segmenter=(segmenter,)
            if isinstance(segmenter, str)
            else conformed("segmenter", segmenter, tuple[str, ...]),
        )
        registered = _registered(classes, workflows)
        config = StencilConfig(
            engine=EngineConfig(
                models=_all_models(only, models),
                scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, model_bytes=model_bytes, degree=degree),
                cache=cache,
                data_parallel_size=data_parallel_size,
                workers_per_engine=workers_per_engine,
                classes=registered.classes,
                workflows=registered.workflows,
            ),
            image=ImageConfig(image_workers=image_workers),
            max_queue=MAX_IN_FLIGHT * data_parallel_size * 10,
            approximate_cache_bytes=approximate_cache_bytes,
            skip_levels=None if skip_levels is None else tuple(_all_of("skip_levels", skip_levels, SkipLevel)),
        )
        self._loop = uvloop.new_event_loop()
        # A daemon thread: a program that forgets `close` still exits, and the engine's processes end with it.
        self._thread = threading.Thread(target=self._loop.run_forever, name="stencil", daemon=True)
        self._thread.start()
        self._is_closed = False
        self._pid = os.getpid()
        try:
            self._engine = self._run(_start(config))
        except BaseException:
            self._stop_loop()
            raise

    def generate(
        self,
        edits: Sequence[Edit | Mapping[str, ClassInput]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        model: str = "",
        use_tqdm: bool = True,
    ) -> list[EditResult]:
        """Run all edits, batched. Results are in the order of `edits`; a failed edit has its error in its result.

        edits: of models, Edits; of a workflow of users' classes alone, its inputs by name. sampling_params: one for all
        edits, or one per edit; of a workflow alone, its priority and timeout. model: name of the model, for edits that
        name none, or of the workflow. Raises InvalidRequestError if the number of sampling_params differs from that of
        edits, or for values of another type.
        """
        self._check_open()
        edits = _all_of("edits", edits, Edit | Mapping)  # type: ignore[arg-type]
        params = _per_edit(sampling_params, len(edits))
        model = conformed("model", model, str)
        with tqdm(total=len(edits), desc="Edits", unit="edit", disable=not use_tqdm) as progress:
            return self._run(self._generate(edits, params, model, progress))

    @property
    def model(self) -> ModelInfo:
        """The first model's properties, including how its templates are cached."""
        return next(iter(self._engine.models.values()))

    @property
    def models(self) -> dict[str, ModelInfo]:
        """The properties of all models and adapters, by name."""
        return dict(self._engine.models)

    @property
    def device_page_bytes(self) -> int:
        """Device memory for cached pages, in bytes per engine; 0 if pages are read from host memory."""
        return self._engine.cache.device_bytes or 0

    def create_template(
        self, image: ImageLike, *, model: str = "", lora: str | Lora | Sequence[str | Lora] = ""
    ) -> RegisteredTemplate:
        """Register an image that will be edited often, and compute the pages that its edits with this model and these
        adapters share. Pass the template's `id` as `Edit.template_id`. Raises InvalidRequestError.
        """
        self._check_open()
        model, loras = conformed("model", model, str), named_loras(lora)
        upload = BytesUpload(encode_picture(conformed("image", image, ImageLike), "image"))
        name = f"offline-{uuid.uuid4().hex}"
        return self._run(self._engine.prime_template(name, upload, model=model, loras=loras))

    def load_adapter(self, name: str, path: str | Path, *, model: str = "", wait: bool = True) -> ModelInfo:
        """Serve one more LoRA adapter under a name. path: of a safetensors file, or a folder with one. wait: until
        edits may use it; False: it is loaded meanwhile, and edits may begin without it whose `steps_without_lora` says
        so. Raises InvalidRequestError, EngineError.
        """
        self._check_open()
        asked = conformed("name", name, str), str(conformed("path", path, str | Path)), conformed("model", model, str)
        if conformed("wait", wait, bool):
            return self._run(self._engine.load_adapter(*asked))
        return self._run(_begin_adapter(self._engine, *asked))

    def close(self) -> None:
        """Stop the engine's processes. Calls running in other threads return first, with errors in their results.
        Idempotent.
        """
        self._check_process()
        if not self._is_closed:
            self._is_closed = True
            try:
                self._run(self._engine.shutdown(drain_seconds=0.0))
                self._on_loop(_others_done())
            finally:
                self._stop_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _generate(
        self,
        edits: Sequence[Edit | Mapping[str, ClassInput]],
        params: Sequence[SamplingParams],
        model: str,
        progress: tqdm[Any],
    ) -> list[EditResult]:
        places = asyncio.Semaphore(MAX_IN_FLIGHT * self._engine.config.engine.data_parallel_size)

        async def one(edit: Edit | Mapping[str, ClassInput], sampling: SamplingParams) -> EditResult:
            async with places:
                result = await _result(self._engine, edit, sampling, model)
            progress.update()
            return result

        return await asyncio.gather(*map(one, edits, params))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop. Ctrl-C cancels it and is raised after its cleanup; a second Ctrl-C is
        raised at once.
        """
        task = self._on_loop(_begin(coroutine))
        try:
            return self._on_loop(_outcome(task))
        except BaseException:
            self._loop.call_soon_threadsafe(task.cancel)
            self._on_loop(asyncio.wait({task}))
            raise

    def _check_open(self) -> None:
        self._check_process()
        if self._is_closed:
            raise EngineError("this ImageEngine is closed; make another one")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise EngineError(
                f"this ImageEngine belongs to process {self._pid}, and this is a fork of it; make one in each process"
            )

    def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _begin(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return asyncio.create_task(coroutine)


async def _outcome(task: asyncio.Task[T]) -> T:
    return await task


async def _others_done() -> None:
    """Wait for the calls of other threads, which end once the engine has shut down."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


async def _start(config: StencilConfig) -> AsyncEngine:
    engine = AsyncEngine(config)
    await engine.start()
    try:
        await engine.ready()
    except BaseException:  # Ctrl-C arrives as a cancellation
        await engine.shutdown(drain_seconds=0.0)
        raise
    return engine


async def _begin_adapter(engine: AsyncEngine, name: str, path: str, model: str) -> ModelInfo:
    return engine.begin_adapter(name, path, model)


async def _result(
    engine: AsyncEngine, edit: Edit | Mapping[str, ClassInput], sampling: SamplingParams, model: str
) -> EditResult:
    """Run one edit, or a workflow of users' classes. A failure is returned as the result's error, not raised."""
    try:
        if isinstance(edit, Edit):
            return await _edit(engine, edit, sampling, edit.model or model)
        return await _run(engine, edit, sampling, model)
    except StencilError as error:
        return EditResult(error=error)
    except Exception as error:  # a bug must fail this edit only, not all edits of the call
        logger.exception("an edit failed")
        return EditResult(error=EngineError(f"internal error: {error!r}"))


async def _edit(engine: AsyncEngine, edit: Edit, sampling: SamplingParams, model: str) -> EditResult:
    if model in engine.workflows:
        problem = f"'{model}' is a workflow alone; instead of an Edit give its inputs, a dict by name"
        raise InvalidRequestError(f"Invalid 'edits': {problem}.", param="edits")
    choice = engine.choose_model(model, named_loras(edit.lora), sampling.steps_without_lora)
    workflow = engine.workflow_of(choice.model)
    request = await asyncio.to_thread(_to_input, edit, sampling, workflow)
    async with engine.edit(f"offline-{uuid.uuid4().hex}", request, choice) as outputs:
        finals = {output.image_index: (output, bytes(output.data)) async for output in outputs}
    ordered = [finals[index] for index in sorted(finals)]
    reports = [output.report for output, _ in ordered if output.report is not None]
    return EditResult(
        images=[await asyncio.to_thread(decode_picture, data) for _, data in ordered],
        seeds=[output.seed for output, _ in ordered],
        reports=reports,
        values=reports[0].values,
    )


async def _run(
    engine: AsyncEngine, given: Mapping[str, ClassInput], sampling: SamplingParams, model: str
) -> EditResult:
    workflow = engine.workflows.get(model)
    if workflow is None:
        name = engine.choose_model(model).model.name
        problem = f"'{name}' is a model; give it an Edit, with inputs of its workflow in 'inputs'"
        raise InvalidRequestError(f"Invalid 'edits': {problem}.", param="edits")
    _check_no_sampling(sampling, workflow)
    inputs, files = await asyncio.to_thread(class_inputs, workflow, given)
    asked = RunInput(
        workflow=model, inputs=inputs, input_files=files, priority=sampling.priority, timeout=sampling.timeout
    )
    values = await engine.run(f"offline-{uuid.uuid4().hex}", asked)
    pictures = sorted((port.name for port in workflow.own_results if port.type == "picture"), key="picture".__ne__)
    return EditResult(values=values, images=[Image.fromarray(cast(Any, values[name])) for name in pictures])


def _check_no_sampling(sampling: SamplingParams, workflow: Workflow) -> None:
    """Raises InvalidRequestError for a parameter that would be lost."""
    usual = SamplingParams(priority=sampling.priority, timeout=sampling.timeout)
    for name, value in msgspec.structs.asdict(usual).items():
        if getattr(sampling, name) != value:
            problem = f"workflow '{workflow.name}' takes inputs of its own alone; leave it out"
            raise InvalidRequestError(f"Invalid '{name}': {problem}.", param=name)


def _to_input(edit: Edit, sampling: SamplingParams, workflow: Workflow | None) -> EditInput:
    """workflow: of users' classes, that the model has."""
    inputs, files = class_inputs(workflow, edit.inputs) if workflow is not None else _no_inputs(edit)
    is_generation = edit.image is None and edit.template_id is None
    mask = edit.mask if edit.mask is not None else edit.mask_image
    mask_name = "mask" if edit.mask is not None else "mask_image"
    return EditInput(
        prompt=edit.prompt,
        class_label=edit.class_label,
        sampling=sampling,
        image=None if edit.image is None else BytesUpload(encode_picture(edit.image, "image")),
        references=tuple(BytesUpload(encode_picture(each, "references")) for each in edit.references),
        controls=tuple(
            ControlInput(BytesUpload(encode_picture(each.picture, "controls")), each.control) for each in edit.controls
        ),
        mask=None if mask is None else BytesUpload(encode_picture(mask, mask_name)),
        mask_kind="alpha" if edit.mask is not None else "luminance",
        template_id=edit.template_id,
        mask_request=edit.to_mask_request(),
        mask_grow=edit.mask_grow,
        mask_feather=edit.mask_feather,
        padding_mask_crop=edit.padding_mask_crop,
        inputs=inputs,
        input_files=files,
        canvas_size=edit.size if is_generation else None,
        output_size=None if is_generation else edit.size,
    )


def _no_inputs(edit: Edit) -> tuple[dict[str, RunValue], InputFiles]:
    """Of a model without a workflow of users' classes. Raises InvalidRequestError."""
    for name in edit.inputs:
        raise InvalidRequestError(
            f"Invalid '{name}': the model's workflow has no inputs; leave it out.", param=str(name)
        )
    return {}, NO_FILES


def _references(pictures: object) -> tuple[ImageLike, ...]:
    if not isinstance(pictures, list | tuple):
        raise InvalidRequestError("Invalid 'references': expected a list of pictures.", param="references")
    return tuple(conformed("references", picture, ImageLike) for picture in pictures)


def _adapters(loras: Mapping[str, str | Path]) -> tuple[AdapterConfig, ...]:
    for name in conformed("loras", loras, Mapping):
        check_filled("loras", conformed("loras", name, str))
    return tuple(AdapterConfig(name, str(conformed("loras", path, str | Path))) for name, path in loras.items())


def _registered(classes: Sequence[RunClass], workflows: str | Path | Sequence[Workflow | str | Path]) -> Registered:
    """What users have registered, with the workflows of the files among it."""
    workflows = (workflows,) if isinstance(workflows, str | Path) else workflows
    for index, each in enumerate(conformed("workflows", workflows, Sequence)):
        conformed(f"workflows[{index}]", each, Workflow | str | Path)
    graphs = tuple(each for each in workflows if isinstance(each, Workflow))
    files = [each for each in workflows if not isinstance(each, Workflow)]
    return Registered.together(
        [Registered(graphs, tuple(_all_of("classes", classes, RunClass))), read_workflows(files)]
    )


def _all_models(only: ModelConfig, models: Sequence[ModelConfig]) -> tuple[ModelConfig, ...]:
    """The models of an engine. only: from the arguments for a single one, which are defaults if `models` are given."""
    several = _all_of("models", models, ModelConfig)
    if several and only != ModelConfig():
        message = "Give either 'models', each with its own settings, or 'model' and settings for it, not both."
        raise InvalidRequestError(message, param="models")
    return tuple(several) or (only,)


def _all_of(name: str, values: Sequence[T], kind: type[T]) -> list[T]:
    """`values` as a list. Raises InvalidRequestError if any of them is not a `kind`."""
    conformed(name, values, Sequence)
    return [conformed(f"{name}[{index}]", value, kind) for index, value in enumerate(values)]


def _per_edit(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    each = _all_of("sampling_params", params, SamplingParams)
    if len(each) != count:
        message = (
            f"Invalid 'sampling_params': {len(each)} of them for {count} edits; give one for all, or one per edit."
        )
        raise InvalidRequestError(message, param="sampling_params")
    return each
