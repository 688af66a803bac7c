"""Reads a prompt's graph, and makes an edit of the engine for each picture in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from core.errors import InvalidRequestError, WorkflowError
from core.graph.workflow import Workflow
from core.lora import Lora
from core.messages.image_processor import MaskKind
from core.model_choice import ModelChoice
from core.sampling_params import MAX_IMAGES
from engine.client.async_engine import AsyncEngine
from engine.client.edit_types import EditInput
from entrypoints.comfy_api.composed_workflow import composed_workflow
from entrypoints.comfy_api.files import FileName, Files, StoredFile
from entrypoints.openai.body.submission import Submission
from entrypoints.openai.edit_request import Operation, build_call
from entrypoints.openai.fields.default_fields import check_defaults, defaults_of
from entrypoints.openai.fields.field import Value
from entrypoints.workflows.comfy.composition import Composition
from entrypoints.workflows.comfy.composition_reader import read_picture
from entrypoints.workflows.comfy.graph import Node
from entrypoints.workflows.comfy.graph_reader import read_graph
from entrypoints.workflows.comfy.model_scheduler import ModelScheduler
from entrypoints.workflows.comfy.results import all_results
from entrypoints.workflows.comfy.served_graph import check_samplers, check_served

MAX_PICTURES = 8
"""Pictures of one graph, each of samplers of its own; those of a batch count as one."""

MOST_PREVIEWS = 3
"""That a picture may have."""

_CHANNELS: Mapping[str, MaskKind] = {"red": "red", "green": "green", "blue": "blue"}


@dataclass(frozen=True, slots=True)
class GraphEdit:
    """What makes one picture, or the pictures of one batch. workflow: with the composition's defaults."""

    decoder: Node
    composition: Composition
    workflow: Workflow


@dataclass(frozen=True, slots=True)
class ReadGraph:
    """A prompt's graph. saved: node that saves or shows pictures -> the VAEDecode or LoadImage that makes these."""

    nodes: Mapping[str, Node]
    edits: tuple[GraphEdit, ...]
    saved: Mapping[str, Node]

    @classmethod
    def of(cls, text: str) -> ReadGraph:
        """Read the JSON of a graph. Takes some milliseconds, in any thread. Raises WorkflowError that names node and
        input.
        """
        graph = read_graph(text)
        saved = all_results(graph)
        decoders = {made.id: made for made in saved.values() if made.kind == "VAEDecode"}
        if len(decoders) > MAX_PICTURES:
            raise WorkflowError(f"it decodes {len(decoders)} pictures, and may {MAX_PICTURES}", node="")
        for id_ in saved:
            _check_prefix(graph.nodes[id_])
        edits = tuple(map(_edit_of, decoders.values()))
        if (number := sum(each.composition.number for each in edits)) > MAX_IMAGES:
            raise WorkflowError(f"it makes {number} pictures, and may {MAX_IMAGES}", node="")
        return cls(graph.nodes, edits, saved)


def _edit_of(decoder: Node) -> GraphEdit:
    composition = read_picture(decoder)
    workflow = replace(composed_workflow(composition), defaults=dict(composition.defaults))
    check_defaults(workflow)
    return GraphEdit(decoder, composition, workflow)


def _check_prefix(node: Node) -> None:
    """Raises WorkflowError for a prefix that is no name of a file."""
    subfolder, _, name = str(node.values.get("filename_prefix", "ComfyUI")).rpartition("/")
    try:
        FileName.of(f"{name}_00001_.png", subfolder)
    except InvalidRequestError as error:
        raise node.error(str(error), "filename_prefix") from error


def check_loaded(read: ReadGraph, files: Files, owner: str) -> dict[str, StoredFile]:
    """Node that loads a picture -> the file. Raises WorkflowError for a file that is not there."""
    return {id_: _file(node, files, owner) for id_, node in read.nodes.items() if node.kind.startswith("LoadImage")}


def _file(node: Node, files: Files, owner: str) -> StoredFile:
    """What a LoadImage or LoadImageMask loads. Raises WorkflowError."""
    try:
        name = FileName.of_input(str(node.values["image"]))
    except InvalidRequestError as error:
        raise node.error(str(error), "image") from error
    found = files.find(owner, name)
    if found is None:
        raise node.error(f"there is no file {name.name!r} in {name.folder}; upload it", "image")
    return found


class GraphEdits:
    """Makes edits for the models that an engine serves."""

    def __init__(self, engine: AsyncEngine) -> None:
        """Reads the schedulers of the models that the server starts with; later a disk that hangs would stop it."""
        self._engine = engine
        self._schedulers = {model.name: ModelScheduler.read(model) for model in engine.config.engine.models}

    def call(
        self, edit: GraphEdit, loaded: Mapping[str, StoredFile], owner: str, *, shows_previews: bool
    ) -> tuple[ModelChoice, EditInput]:
        """Who makes a picture, and of what. loaded: of `check_loaded`. Raises WorkflowError that names node and input,
        InvalidRequestError.
        """
        composition = edit.composition
        choice = self._choice(composition)
        submission, kind = _submission(composition, loaded)
        is_edit = composition.picture is not None
        operation: Operation = "image_edit" if is_edit else "image_generation"
        made = build_call(operation, submission, choice, owner, defaults_of(edit.workflow)).edit
        steps = made.sampling.num_inference_steps or 1
        return choice, replace(
            made,
            prompt=str(composition.defaults.get("prompt", "")),
            is_batch=True,
            mask_kind=kind,
            base64=False,
            partial_images=min(MOST_PREVIEWS, steps - 1) if shows_previews else 0,
        )

    def _choice(self, composition: Composition) -> ModelChoice:
        """The model with its adapters. Raises WorkflowError that names the node for what is not served."""
        models = self._engine.models
        names = [name for name, info in models.items() if not info.parent and not info.workflow]
        if composition.model.name in models and models[composition.model.name].workflow:
            problem = "it has a workflow already, which the server's operator has chosen"
            raise composition.model.node.error(problem, composition.model.input)
        check_served(composition.model, names, "model")
        base = models[composition.model.name]
        adapters = [name for name, info in models.items() if info.parent == base.name]
        for named in composition.lora_files:
            check_served(named, adapters, f"adapter of {base.name}")
        for control in composition.controls:
            check_served(control.net, base.controls, f"control type of {base.name}")
        refiner = base.roles.get("refiner")
        if composition.refiner is not None:
            check_served(composition.refiner, [refiner] if refiner else [], f"refiner of {base.name}")
        if (scheduler := self._schedulers.get(base.name)) is not None:
            check_samplers(composition, scheduler, self._schedulers.get(refiner or ""))
        loras = tuple(Lora(name, scale) for name, scale in composition.loras.items())
        return self._engine.choose_model(base.name, loras)


def _submission(composition: Composition, loaded: Mapping[str, StoredFile]) -> tuple[Submission, MaskKind]:
    """What a request would give of a graph, and what its mask is."""
    given: dict[str, Value] = {"n": composition.number}
    if "prompt" not in composition.defaults:
        given["prompt"] = "-"  # requests must say one; replaced by the empty text
    submission = Submission(values=given)
    for number, control in enumerate(composition.controls):
        submission.controls[f"control_image[{number}]"] = loaded[control.picture.id]
    if composition.picture is None:
        return submission, "none"
    picture = loaded[composition.picture.id]
    submission.uploads["image"] = picture
    if composition.mask is None:
        return submission, "none"
    mask = loaded[composition.mask.id]
    channel = str(composition.mask.values.get("channel", "alpha"))
    if channel != "alpha":
        submission.uploads["mask_image"] = mask
        return submission, _CHANNELS[channel]
    if mask is picture and mask.mask is None:
        return submission, "own"
    submission.uploads["mask"] = mask.mask or mask
    return submission, "alpha"


def at_fault(edit: GraphEdit, error: InvalidRequestError) -> WorkflowError:
    """An error of an edit, with the node that is at fault: by its parameter, or else the sampler."""
    composition = edit.composition
    loaders = {"image": composition.picture, "mask": composition.mask, "mask_image": composition.mask}
    if composition.controls:
        loaders["control_image"] = composition.controls[0].picture
    node = loaders.get((error.param or "").partition("[")[0])
    if node is not None:
        return node.error(str(error), "image")
    return composition.passes[0].node.error(str(error))
