"""ObjectInfo: what /object_info says of the classes of nodes, as ComfyUI's clients read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.model_info import ModelInfo
from entrypoints.workflows.comfy.input_kind import Choice, Flag, InputKind, Integer, Link, Number, Text, Unread
from entrypoints.workflows.comfy.node_class import NODE_CLASSES, RESULTS, NodeClass


def object_info(models: Mapping[str, ModelInfo], uploads: Sequence[str]) -> dict[str, Any]:
    """Of all classes. models: that are served, adapters included. uploads: the caller's."""
    names = _names(models, uploads)
    return {name: _info(name, known, names) for name, known in NODE_CLASSES.items()}


def _names(models: Mapping[str, ModelInfo], uploads: Sequence[str]) -> dict[str, list[str]]:
    """Input -> the files that it may name."""
    base = [name for name, info in models.items() if not info.parent and not info.workflow]
    adapters = [name for name, info in models.items() if info.parent]
    nets = list(dict.fromkeys(name for info in models.values() for name in info.controls))
    of_models = ("ckpt_name", "unet_name", "clip_name", "clip_name1", "clip_name2", "vae_name")
    return {
        **dict.fromkeys(of_models, base),
        "lora_name": adapters,
        "control_net_name": nets,
        "image": list(uploads),
    }


def served_files(models: Mapping[str, ModelInfo]) -> dict[str, list[str]]:
    """ComfyUI's folder of models -> the names in it."""
    names = _names(models, [])
    return {
        "checkpoints": names["ckpt_name"],
        "diffusion_models": names["unet_name"],
        "text_encoders": names["clip_name"],
        "vae": names["vae_name"],
        "loras": names["lora_name"],
        "controlnet": names["control_net_name"],
        "embeddings": [],
    }


def _info(name: str, known: NodeClass, names: Mapping[str, list[str]]) -> dict[str, Any]:
    inputs: dict[str, dict[str, Any]] = {"required": {}, "optional": {}}
    for each, kind in known.inputs.items():
        if not isinstance(kind, Unread):
            is_optional = kind.is_optional if isinstance(kind, Link) else each in known.optional
            inputs["optional" if is_optional else "required"][each] = _input(each, kind, names)
    inputs = {group: members for group, members in inputs.items() if members}
    return {
        "input": inputs,
        "input_order": {group: list(members) for group, members in inputs.items()},
        "output": known.outputs,
        "output_is_list": [False] * len(known.outputs),
        "output_name": known.outputs,
        "name": name,
        "display_name": name,
        "description": "",
        "python_module": "nodes",
        "category": "stencil",
        "output_node": name in RESULTS,
    }


def _input(name: str, kind: InputKind, names: Mapping[str, list[str]]) -> list[Any]:
    match kind:
        case Text() if name in names:
            return [names[name], {"image_upload": True}] if name == "image" else [names[name]]
        case Text():
            return ["STRING", {"multiline": name == "text"}]
        case Integer():
            return ["INT", {"default": kind.low, "min": kind.low, "max": kind.high}]
        case Number():
            return ["FLOAT", {"default": kind.low, "min": kind.low, "max": kind.high, "step": 0.01}]
        case Flag():
            return ["BOOLEAN", {"default": True}]
        case Choice():
            return [list(kind.words)]
        case Link():
            return [kind.type]
        case _:
            raise AssertionError(f"{kind} has a form of its own")
