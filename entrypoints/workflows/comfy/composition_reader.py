"""Reads what a ComfyUI graph means, from its results upwards."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from core.control import MAX_CONTROLS
from core.graph.workflow import Literal
from core.lora import MAX_LORAS
from core.sampling_params import MAX_HIRES_SCALE, MAX_SIDE, MIN_HIRES_SCALE
from entrypoints.workflows.comfy.composition import Composition, Control, Named, Pass
from entrypoints.workflows.comfy.conditioning import Conditioning
from entrypoints.workflows.comfy.graph import Graph, Node
from entrypoints.workflows.comfy.latents import EMPTY, Latents
from entrypoints.workflows.comfy.passes import read_passes
from entrypoints.workflows.comfy.results import last_result
from entrypoints.workflows.comfy.sampler_names import levels_of, passed
from entrypoints.workflows.comfy.strength import asked_strength
from entrypoints.workflows.comfy.weights import Weights

LATENT_SIDE = 8
"""px of a latent's side, as ComfyUI counts."""

FLUX_GUIDANCE = 3.5
"""That ComfyUI gives FLUX where no node says it."""

TEXT_TOKENS = {"flux": 256, "sd3": 77}
"""Family -> the length to which ComfyUI pads the text of its T5."""


def read_composition(graph: Graph) -> Composition:
    """Of a graph's last picture, that all requests get. Raises WorkflowError that names node and input for what no
    workflow here can say.
    """
    decoder, left_out = last_result(graph)
    composition = _Reader(decoder).composition()
    if composition.number > 1:
        raise Latents.at(decoder.links["samples"]).first.error("requests say it, as n; give 1", "batch_size")
    return replace(composition, left_out=left_out)


def read_picture(decoder: Node) -> Composition:
    """Of the pictures that a VAEDecode makes of a sampler's latents. Raises as `read_composition`."""
    return _Reader(decoder).composition()


class _Reader:
    def __init__(self, decoder: Node) -> None:
        self._decoder = decoder
        self._latents = Latents.at(self._decoder.links["samples"])
        self._samplers = self._latents.samplers
        self._begin = self._latents.first
        self._weights = [Weights.at(sampler.links["model"]) for sampler in self._samplers]
        self._positive = [Conditioning.at(sampler.links["positive"]) for sampler in self._samplers]
        self._negative = [Conditioning.at(sampler.links["negative"]) for sampler in self._samplers]
        refines = [each.named.file != self._weights[0].named.file for each in self._weights]
        is_empty = self._begin.kind in EMPTY
        self._passes = read_passes(self._samplers, is_empty=is_empty, refines=refines)
        self._family = self._family_of()
        self._loras = tuple(map(_lora, self._weights[0].loras[::-1]))

    def composition(self) -> Composition:
        refiner = self._check_models()
        self._check_alike()
        picture, mask = self._edited()
        size, scale = self._sizes()
        controls = self._controls()
        decodes_with_refiner = self._check_vaes(refiner)
        if self._family and (cut := next((each for each in self._passes if each.end < 1), None)):
            problem = "samplers share a schedule by its noise levels, and those of this family are not even in steps"
            raise cut.node.error(problem, "end_at_step")
        return Composition(
            self._passes,
            self._weights[0].named,
            refiner.named if refiner else None,
            decodes_with_refiner,
            {each.name: _lora_scale(each.node) for each in self._loras},
            self._loras,
            controls,
            picture,
            mask,
            scale,
            str(self._latents.enlarger.values["upscale_method"]) if self._latents.enlarger else "bilinear",
            self._defaults(size, mask, controls),
            number=int(self._begin.values.get("batch_size", 1)),
        )

    # ------------------------------------------------------------------------------------------------ weights

    def _family_of(self) -> str:
        """flux, sd3, or "" for UNets, by what the graph says of its text encoders, latents and files."""
        text = Weights.at(self._positive[0].text.links["clip"]).loader
        kind, file = str(text.values.get("type", "")), self._weights[0].named.name.lower()
        if kind == "flux" or "flux" in file or self._positive[0].guidance is not None:
            return "flux"
        is_sd3 = kind == "sd3" or "sd3" in file or self._begin.kind == "EmptySD3LatentImage"
        return "sd3" if is_sd3 else ""

    def _check_models(self) -> Weights | None:
        """The refiner, if there is one."""
        base, refiner = self._weights[0], None
        if len(base.loras) > MAX_LORAS:
            raise base.loras[0].error(f"there are {len(base.loras)} adapters, and may be {MAX_LORAS}")
        names = [each.name for each in self._loras]
        if twice := next((each for each in self._loras if names.count(each.name) > 1), None):
            problem = "two nodes read this adapter; give it once, with the sum of the scales"
            raise twice.node.error(problem, twice.input)
        for weights, each in zip(self._weights, self._passes, strict=True):
            if not each.is_refiner:
                if [node.id for node in weights.loras] != [node.id for node in base.loras]:
                    raise each.node.error("another sampler's model has other adapters", "model")
            elif weights.loras:
                raise weights.loras[0].error("a second model has no adapters")
            elif refiner is not None and refiner.named.file != weights.named.file:
                raise each.node.error("it is a third model, and there may be two", "model")
            else:
                refiner = weights
        for weights, told in zip(self._weights * 2, self._positive + self._negative, strict=True):
            weights.check_text(told.text)
        return refiner

    def _check_vaes(self, refiner: Weights | None) -> bool:
        """Whether the refiner's VAE decodes."""
        base = self._weights[0]
        encoders = [self._begin, *filter(None, (self._positive[0].inpainting,)), *self._positive[0].controls]
        for node in encoders:
            if "vae" in node.links:
                base.check_vae(node)
        if refiner is not None and self._decoder.links["vae"].node is refiner.loader:
            return True
        base.check_vae(self._decoder)
        return False

    # ------------------------------------------------------------------------------------------------ what is told

    def _check_alike(self) -> None:
        """All samplers have one prompt, one guidance, and the base model's one set of ControlNets."""
        for told in (self._positive, self._negative):
            words = told[0].words
            for node, other in zip(self._samplers, told, strict=True):
                name = "positive" if told is self._positive else "negative"
                is_same = other.text.values["text"] == told[0].text.values["text"]
                if not is_same and other.words != words:
                    problem = f"another text than that of node {told[0].text.id}, and a request has one"
                    raise other.text.error(problem, "text")
                if [each.id for each in other.controls] != [each.id for each in told[0].controls]:
                    raise node.error("another sampler has other ControlNets, and a request has the same in all", name)
                if other.inpainting is not told[0].inpainting:
                    raise node.error("another sampler edits another picture", name)
        for node in self._samplers:
            if node.values["cfg"] != self._samplers[0].values["cfg"]:
                raise node.error(f"node {self._samplers[0].id} has another, and a request has one", "cfg")
            if node.values["cfg"] < 1:
                raise node.error("below 1 it is none here; give 1", "cfg")
        self._check_guidance()
        if self._positive[0].controls and any(each.is_refiner for each in self._passes):
            raise self._positive[0].controls[0].error("ControlNets are of one model, and there is a second one")
        advanced = [node for node in self._positive[0].controls if node.kind == "ControlNetApplyAdvanced"]
        if list(self._negative[0].controls) != advanced:
            problem = "positive and negative pass other ControlNets; let both pass each ControlNetApplyAdvanced"
            raise self._samplers[0].error(problem, "negative")

    def _check_guidance(self) -> None:
        """All that samplers read has one guidance, also where no FluxGuidance says it. A negative conditioning is read
        where cfg is above 1. Raises WorkflowError.
        """
        first = _guidance(self._positive[0])
        for name, told in (("positive", self._positive), ("negative", self._negative)):
            for sampler, each in zip(self._samplers, told, strict=True):
                is_read = name == "positive" or sampler.values["cfg"] > 1
                if _guidance(each) == first or (each.guidance is None and not is_read):
                    continue
                problem = f"its guidance is {_guidance(each):g}, and that of another is {first:g}; a request has one"
                if each.guidance is not None:
                    raise each.guidance.error(problem, "guidance")
                raise sampler.error(f"no FluxGuidance is on its way, so {problem}", name)

    def _defaults(self, size: str, mask: Node | None, controls: Sequence[Control]) -> dict[str, Literal]:
        """What requests say that the graph says."""
        first, cfg = self._passes[0], float(self._samplers[0].values["cfg"])
        found: dict[str, Literal] = {"prompt": words} if (words := self._positive[0].words) else {}
        found["seed"] = first.seed
        found["num_inference_steps"] = first.total
        if size:
            found["size"] = size
        if not first.is_whole:
            found["strength"] = asked_strength(first.steps, first.total, is_flow=bool(self._family))
        if self._family == "flux":
            found["guidance_scale"] = _guidance(self._positive[0])
        else:
            found["guidance_scale"] = cfg
        if cfg > 1:
            found["negative_prompt"] = self._negative[0].words
            found |= {"true_cfg_scale": cfg} if self._family == "flux" else {}
        if self._family:
            found["max_sequence_length"] = TEXT_TOKENS[self._family]
        if mask is not None:
            found["mask_aware"] = False
        if self._begin.kind == "VAEEncodeForInpaint" and (grown := int(self._begin.values["grow_mask_by"])) > 1:
            found["mask_grow"] = math.ceil((grown - 1) / 2)
        return found | _said_of(controls)

    # ------------------------------------------------------------------------------------------------ pictures

    def _edited(self) -> tuple[Node | None, Node | None]:
        """The nodes that load picture and mask."""
        begin, inpainting, setter = self._begin, self._positive[0].inpainting, self._latents.mask_setter
        if inpainting is not self._negative[0].inpainting:
            raise self._samplers[0].error("positive and negative edit other pictures", "negative")
        if (begin.kind == "InpaintModelConditioning" or inpainting) and begin is not inpainting:
            node = inpainting or begin
            raise node.error("samplers read its latents and both of its conditionings")
        if begin.kind in EMPTY:
            if setter is not None:
                raise setter.error("there is no picture to keep outside of the mask", "mask")
            return None, None
        pixels = begin.links["pixels"].node
        if pixels.kind != "LoadImage":
            raise begin.error("a request gives its picture: read a LoadImage", "pixels")
        if setter is not None and "mask" in begin.links:
            raise setter.error(f"node {begin.id} has a mask already", "mask")
        masker = setter or begin
        mask = masker.links.get("mask")
        return pixels, mask.node if mask else None

    def _sizes(self) -> tuple[str, float]:
        """(size of the result, or "" for that of the picture; how many times smaller the first pass is)"""
        enlarger, begin = self._latents.enlarger, self._begin
        if begin.kind not in EMPTY:
            if enlarger is not None:
                raise enlarger.error("a picture that is edited keeps its size")
            return "", 1.0
        sides = int(begin.values["width"]), int(begin.values["height"])
        for name, side in zip(("width", "height"), sides, strict=True):
            if side % LATENT_SIDE:
                raise begin.error(f"it is no multiple of {LATENT_SIDE}", name)
        if enlarger is None:
            return f"{sides[0]}x{sides[1]}", 1.0
        larger = [_enlarged(enlarger, name, side) for name, side in zip(("width", "height"), sides, strict=True)]
        scale = larger[0] / sides[0]
        if larger[1] / sides[1] != scale:
            raise enlarger.error(f"it makes {larger[0]}x{larger[1]} of {sides[0]}x{sides[1]}: keep the proportions")
        if not MIN_HIRES_SCALE <= scale <= MAX_HIRES_SCALE:
            problem = f"{scale:g} times: from {MIN_HIRES_SCALE:g} to {MAX_HIRES_SCALE:g} times is enlarged"
            raise enlarger.error(problem, "scale_by" if enlarger.kind == "LatentUpscaleBy" else "width")
        if max(larger) > MAX_SIDE:
            raise enlarger.error(f"it makes {larger[0]}x{larger[1]}, and a side may have {MAX_SIDE} px")
        return f"{larger[0]}x{larger[1]}", scale

    def _controls(self) -> tuple[Control, ...]:
        nodes = self._positive[0].controls
        if len(nodes) > MAX_CONTROLS:
            raise nodes[-1].error(f"there are {len(nodes)} control pictures, and may be {MAX_CONTROLS}")
        return tuple(map(self._control, nodes))

    def _control(self, node: Node) -> Control:
        loader, picture = node.links["control_net"].node, node.links["image"].node
        if picture.kind != "LoadImage":
            raise node.error("a request gives its control picture: read a LoadImage", "image")
        net = Named(str(loader.values["control_net_name"]), loader, "control_net_name")
        parts = {_steered(node, each, self._family) for each in self._passes}
        if len(parts) > 1:
            raise node.error("it steers another share of each sampler's steps, and a request says one", "end_percent")
        ((start, end),) = parts
        return Control(net, picture, float(node.values["strength"]), start, end)


def _guidance(told: Conditioning) -> float:
    """That FLUX is told."""
    return float(told.guidance.values["guidance"]) if told.guidance else FLUX_GUIDANCE


def _lora(node: Node) -> Named:
    return Named(str(node.values["lora_name"]), node, "lora_name")


def _lora_scale(node: Node) -> float:
    scale = float(node.values["strength_model"])
    if scale != node.values["strength_clip"]:
        raise node.error(f"it is not strength_model, {scale:g}, and an adapter has one scale", "strength_clip")
    return scale


def _enlarged(node: Node, name: str, side: int) -> int:
    """A side in px of what a node makes of latents."""
    if node.kind == "LatentUpscale":
        return int(node.values[name]) // LATENT_SIDE * LATENT_SIDE
    return round(side // LATENT_SIDE * float(node.values["scale_by"])) * LATENT_SIDE


def _steered(node: Node, each: Pass, family: str) -> tuple[float, float]:
    """The part of a pass's steps that a ControlNet steers. start_percent and end_percent are of training time, also
    that of steps that are not run.
    """
    start, end = (float(node.values.get(f"{name}_percent", whole)) for name, whole in (("start", 0), ("end", 1)))
    if (start, end) == (0.0, 1.0):
        return start, end
    if levels_of(each.schedule):
        problem = f"schedule {each.schedule} of node {each.node.id} is not even in time; steer all steps"
        raise node.error(problem, "start_percent" if start else "end_percent")
    first = each.total - each.steps
    shares = [passed(each.schedule, first + step, each.total, family) for step in range(each.steps)]
    is_none = start == 1 or (end == 0 and not family)  # then ComfyUI steers not even a step that is there
    steps = [step for step, share in enumerate(shares) if start <= share <= end and not is_none]
    if not steps:
        raise node.error(f"no step of node {each.node.id} is in this part", "end_percent")
    return steps[0] / each.steps, (steps[-1] + 1) / each.steps


def _said_of(controls: Sequence[Control]) -> dict[str, Literal]:
    """What requests say of control pictures."""
    found: dict[str, Literal] = {}
    for name, values, usual in (
        ("control_type", [each.net.name for each in controls], None),
        ("control_scale", [each.scale for each in controls], None),
        ("control_start", [each.start for each in controls], 0.0),
        ("control_end", [each.end for each in controls], 1.0),
    ):
        if set[object](values) - {usual}:
            found[name] = _each(values)
    return found


def _each(values: Iterable[str | float]) -> Literal:
    """One value for all control pictures, or one for each."""
    listed = list(values)
    return listed[0] if len(set(listed)) == 1 else json.dumps(listed)
