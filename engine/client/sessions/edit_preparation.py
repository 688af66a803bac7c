"""EditPreparation: turns one edit's uploads into requests to the engines. It waits for an image processor at most."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec

from core.errors import InvalidRequestError
from core.graph.workflow import Workflow
from core.graph.workflows.find_mask import FIND_MASK
from core.handles import NOWHERE, ArrayRef
from core.messages.image_processor import CanvasScale, PreparedImages, PrepareImages
from core.model_choice import ModelChoice
from core.model_info import ModelInfo
from core.routing.request_shape import RequestShape, encodings_of, loops_of, steered_of
from engine.client.edit_types import EditInput
from engine.client.recall.edit_recall import EditRecall
from engine.client.recall.prompt_embedding import EMBEDDING_BYTES
from engine.client.recall.recalled import Recalled
from engine.client.resolve.approximate import can_recall, levels_of, wants_caching
from engine.client.resolve.chosen_controls import chosen_controls
from engine.client.resolve.chosen_workflow import chosen_workflow, rounds_of
from engine.client.resolve.class_label import chosen_class
from engine.client.resolve.mask_aware import resolve_margin
from engine.client.resolve.sampling_defaults import resolve
from engine.client.resolve.sought_mask import check_sought_mask
from engine.client.services import Services
from engine.client.sessions.class_files import ClassFiles
from engine.client.sessions.class_values import ClassValues
from engine.client.sessions.edit_images import EditImage
from engine.client.sessions.edit_requests import EditRequests
from engine.client.sessions.image_work import ImageSeconds, compose_work, num_files, prepare_work
from engine.client.sessions.prepared_edit import PreparedEdit
from engine.client.sessions.session_memory import SessionMemory
from engine.client.templates.template_store import RegisteredTemplate, TemplateStore
from engine.images import image_ops
from engine.images.image_jobs import Caller
from engine.observability.tracing import Span


class EditPreparation:
    """EditSession calls store, prepare and make_images once each, in this order. The properties may be read before."""

    def __init__(
        self,
        services: Services,
        caller: Caller,
        edit: EditInput,
        choice: ModelChoice,
        memory: SessionMemory,
        span: Span,
    ) -> None:
        """memory: for all that it allocates. Raises InvalidRequestError, TemplateNotFoundError."""
        self._services = services
        self._caller = caller
        if edit.controls:  # of an earlier step, whose pages a rank's death may take, nobody knows what was added
            choice = replace(choice, model=msgspec.structs.replace(choice.model, step_schedules=()))
        self._choice = choice
        self._model = model = choice.model
        _check_references(edit, model)
        check_sought_mask(edit, model)
        self._controls = chosen_controls(edit, model)
        self._class_label = chosen_class(edit, model)
        if self._class_label is not None:  # made at the model's own size
            edit = replace(edit, canvas_size=None, output_size=edit.canvas_size)
        self._edit = edit
        self._memory = memory
        self._span = span
        fixed = services.served.workflows[model.workflow] if model.workflow else None
        self._sampling = resolve(edit.sampling, model, services.config.step_schedule, fixed)
        self._workflow = self._chosen_workflow()
        self._wants_caching = wants_caching(edit.sampling, model, self._workflow, services.config)
        _check_partial_images(edit, self._workflow)
        self._values = ClassValues(self._workflow, memory)
        self._files = ClassFiles(services, self._workflow, memory, caller)
        self._given = dict[str, ArrayRef]()  # for nodes of users' classes, once they are stored
        self._template = _find_template(edit, services.templates.store)
        self._upload = self._template.upload if self._template else edit.image
        self._ready_at = 0.0  # when the images were prepared, seconds of CLOCK_MONOTONIC

    def _chosen_workflow(self) -> Workflow:
        edit = self._edit
        if edit.makes_mask:
            return FIND_MASK
        finds_mask = edit.mask_request is not None
        return chosen_workflow(
            self._model,
            self._sampling,
            self._class_label,
            finds_mask=finds_mask,
            is_controlled=bool(edit.controls),
            is_edit=edit.image is not None or edit.template_id is not None,
            workflows=self._services.served.workflows,
        )

    @property
    def smallest_shape(self) -> RequestShape:
        """The least work that this edit can be for the engines; its tokens are not known yet."""
        sampling, model = self._sampling, self._model
        workflow, rounds = self._workflow, rounds_of(self._workflow, model, sampling)
        steps, is_exact = sum(rounds), not (sampling.mask_aware and model.page_scheme and workflow.is_mask_aware)
        return RequestShape(
            model.name,
            steps,
            full_steps=steps if is_exact else 0,
            image_tokens=1,
            active_tokens=1,
            text_tokens=model.num_text_tokens(sampling.max_sequence_length),
            priority=sampling.priority,
            num_rows=sampling.num_rows,
            owner=self._edit.owner,
            loops=loops_of(workflow, model, rounds, lambda canvas: 1),
            encodings=encodings_of(workflow, model, lambda canvas: 1),
            controlnets=self._controls.nets,
            num_controls=len(self._controls.controls),
            steered=steered_of(workflow, model, rounds, self._controls.controls, lambda canvas: 1),
        )

    @property
    def image_seconds(self) -> ImageSeconds:
        """Predicted time of all its image work."""
        costs, edit = self._services.images.costs, self._edit
        own = edit.input_files.pictures.values()
        beside = [*edit.references, *(each.picture for each in edit.controls), *own]
        work = prepare_work([self._upload, edit.mask, *beside], self._canvas_size)
        prepare = costs.predict(work) if self._has_files or own else 0.0
        compose = costs.predict(compose_work(edit, self._canvas_size))
        return ImageSeconds(prepare, compose, num_files(edit) * compose)

    @property
    def _canvas_size(self) -> tuple[int, int] | None:
        """(width, height) of the empty canvas; None if there is a picture to edit."""
        if self._upload is not None:
            return None
        return self._edit.canvas_size or (self._model.native_size, self._model.native_size)

    @property
    def _has_files(self) -> bool:
        """Whether there is anything for an image processor to do."""
        edit = self._edit
        is_generation = self._upload is None and edit.mask is None and edit.padding_mask_crop is None
        return not is_generation or bool(edit.controls)

    @property
    def _scales(self) -> tuple[CanvasScale, ...]:
        """The further sizes that the workflow works at."""
        return tuple(
            CanvasScale(name, self._sampling.number(factor), factor if isinstance(factor, str) else "")
            for name, factor in self._workflow.canvases.items()
        )

    async def store(self) -> PrepareImages:
        """Copy the uploads to shared memory; the job for `prepare`. Raises InvalidRequestError, OverloadedError."""
        edit, model, scales = self._edit, self._model, self._scales
        takes_prompt = any(port.name == "prompt" for port in self._workflow.own_inputs)
        self._given = await self._values.store({**edit.inputs, **({"prompt": edit.prompt} if takes_prompt else {})})
        self._given |= await self._files.read(edit.input_files)
        sizes = model.native_size, model.token_size
        nbytes = image_ops.scratch_bytes(*sizes, num_canvases=1 + len(scales), num_controls=len(edit.controls))
        if model.references is not None:
            nbytes += len(edit.references) * image_ops.reference_bytes(model.references)
        return PrepareImages(
            job_id=0,
            image=await self._memory.store(self._upload),
            mask=await self._memory.store(edit.mask),
            mask_kind=edit.mask_kind,
            canvas_size=self._canvas_size,
            mask_margin=resolve_margin(edit.sampling, model, self._workflow),
            native_size=model.native_size,
            token_size=model.token_size,
            max_pixels=self._services.config.image.max_pixels,
            scratch=self._memory.alloc(nbytes) if self._has_files else NOWHERE,
            max_side=model.max_side,
            padding_mask_crop=edit.padding_mask_crop,
            mask_grow=edit.mask_grow,
            mask_feather=edit.mask_feather,
            is_mask_sought=edit.mask_request is not None,
            scales=scales,
            references=tuple([await self._memory.store_file(reference) for reference in edit.references]),
            reference_pictures=model.references,
            controls=tuple([await self._memory.store_file(each.picture) for each in edit.controls]),
        )

    async def prepare(self, job: PrepareImages) -> PreparedEdit:
        """Have an image processor check the uploads and turn them into template, mask and active tokens; without
        uploads there is nothing for it to do. Raises InvalidRequestError, EngineError.
        """
        if self._has_files:
            images = await self._services.images.prepare(job, self._caller)
        else:
            images = image_ops.prepare_nothing(job)
        _check_reference_is_beside_a_mask(images, self._model)
        engine = self._services.served.engine
        asked = self._edit, self._choice, self._sampling, images, engine, self._workflow
        prepared = PreparedEdit(*asked, self._class_label, self._controls)
        prepared = prepared.with_usual_mask(self._services.mask_ratios.usual)
        image_ops.check_output_size(*prepared.output_size, self._edit.output_format)
        self._note_content(images)
        self._ready_at = time.monotonic()
        self._span.child("prepare", self._caller.arrival, self._ready_at, {})
        return prepared

    def _note_content(self, images: PreparedImages) -> None:
        """Note the content id on the registered template, if the edit is of one, so that its pages go with it."""
        template, templates = self._template, self._services.templates.store
        if template is None or template.model != self._model.name:
            return
        if images.crop is None and not images.references:
            templates.set_content(template.id, images.content_id)
        else:
            templates.add_view(template.id, images.content_id)

    def make_images(self, prepared: PreparedEdit) -> list[EditImage]:
        """Make the n images with their requests, and allocate their arrays. Raises OverloadedError, and
        InvalidRequestError for a mask that is asked for outside of the picture."""
        requests = EditRequests(prepared, self._memory.alloc, self._given, self._values.make_places)
        return [self._make_image(requests, index) for index in range(self._edit.sampling.n)]

    def _make_image(self, requests: EditRequests, index: int) -> EditImage:
        call, context = self._caller.edit_id, self._span.traceparent
        request = requests.make(index, f"{call}-{index}", arrival=self._ready_at, call_id=call, trace_context=context)
        assert request.picture.sampling.seed is not None
        recalled = Recalled() if self._wants_caching else None
        return EditImage(index, request.picture.sampling.seed, request, recalled=recalled)

    def make_recall(self, prepared: PreparedEdit) -> EditRecall | None:
        """What approximate caching does for the edit; None: nothing. Raises OverloadedError."""
        services = self._services
        levels = levels_of(self._model, services.config)
        if not self._wants_caching or not can_recall(prepared, levels, services.served.workflows):
            return None
        return EditRecall(services, prepared, levels, self._memory.alloc(EMBEDDING_BYTES))


def _check_partial_images(edit: EditInput, workflow: Workflow) -> None:
    """Raises InvalidRequestError for previews that would not pass through a node of a user's class."""
    between = workflow.last_between
    if edit.partial_images and between is not None and not workflow.has_previews:
        why = f"workflow '{workflow.title}' has pictures pass through '{between.name}', and previews would not"
        raise InvalidRequestError(f"Invalid 'partial_images': {why}; leave it out.", param="partial_images")


def _check_references(edit: EditInput, model: ModelInfo) -> None:
    """Raises InvalidRequestError for references that the model does not see."""
    number, most = len(edit.references), 0 if model.references is None else model.references.most
    if number > most:
        sees = f"at most {most} beside the picture to edit, not {number}" if most else "no references"
        message = f"Invalid 'reference_image': {model.name} sees {sees}; leave them out."
        raise InvalidRequestError(message, param="reference_image")
    if number and edit.image is None and edit.template_id is None:
        message = "Invalid 'reference_image': references go with a picture to edit; give 'image'."
        raise InvalidRequestError(message, param="reference_image")


def _check_reference_is_beside_a_mask(images: PreparedImages, model: ModelInfo) -> None:
    """Raises InvalidRequestError where nothing would be seen of the picture to edit."""
    if images.unmasked and images.references and model.references and model.references.replaces_template:
        reason = f"{model.name} sees it in place of the picture, of which nothing is kept without a mask; give one"
        message = f"Invalid 'reference_image': {reason}, or this picture alone."
        raise InvalidRequestError(message, param="reference_image")


def _find_template(edit: EditInput, templates: TemplateStore) -> RegisteredTemplate | None:
    """Raises TemplateNotFoundError; InvalidRequestError if an image was given as well."""
    if edit.template_id is None:
        return None
    if edit.image is not None:
        message = "Give either 'image' or 'template_id', not both: each of them is the picture to edit."
        raise InvalidRequestError(message, param="template_id")
    return templates.use(edit.template_id, edit.owner)
