"""NodeClass: a class of ComfyUI's nodes that has a meaning here, and the table of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from core.control import MAX_CONTROL_SCALE
from core.interpolation import Interpolation
from core.lora import MAX_SCALE
from core.mask_request import MAX_GROW
from core.sampling_params import (
    MAX_GUIDANCE,
    MAX_IMAGES,
    MAX_INFERENCE_STEPS,
    MAX_PROMPT_CHARACTERS,
    MAX_SIDE,
    MIN_SIDE,
)
from entrypoints.workflows.comfy.input_kind import Choice, Flag, InputKind, Integer, Link, Number, Text, Unread
from entrypoints.workflows.comfy.sampler_names import CURVED, EVEN, SAMPLERS


@dataclass(frozen=True, slots=True)
class NodeClass:
    """What its nodes read and make. optional: inputs with a value that a graph may leave out -> that value."""

    inputs: Mapping[str, InputKind]
    outputs: tuple[str, ...] = ()  # their types
    optional: tuple[str, ...] = ()


_MODEL, _CLIP, _VAE, _LATENT = Link("MODEL"), Link("CLIP"), Link("VAE"), Link("LATENT")
_IMAGE, _MASK, _CONDITIONING, _CONTROL_NET = Link("IMAGE"), Link("MASK"), Link("CONDITIONING"), Link("CONTROL_NET")
_NAME, _SHARE = Text(512), Number(0, 1)
_SIDE = Integer(MIN_SIDE, MAX_SIDE)
_CFG, _SCALE, _SEED, _STEPS = (
    Number(0, MAX_GUIDANCE),
    Number(0, MAX_CONTROL_SCALE),
    Integer(0, 2**64 - 1),
    Integer(1, MAX_INFERENCE_STEPS),
)
_NUMBER = Integer(1, MAX_IMAGES)
_SWITCH = Choice(("enable", "disable"))
_METHOD = Choice(get_args(Interpolation), "latents are not enlarged so")
_SAMPLER = Choice(tuple(SAMPLERS), "no scheduler here does that")
_SCHEDULE = Choice((*EVEN, *CURVED), "no scheduler here does that")
_EMPTY: Mapping[str, InputKind] = {"width": _SIDE, "height": _SIDE, "batch_size": _NUMBER}
_SAMPLING: Mapping[str, InputKind] = {
    "model": _MODEL,
    "positive": _CONDITIONING,
    "negative": _CONDITIONING,
    "latent_image": _LATENT,
    "steps": _STEPS,
    "cfg": _CFG,
    "sampler_name": _SAMPLER,
    "scheduler": _SCHEDULE,
}
_UPLOAD: Mapping[str, InputKind] = {"upload": Unread(), "choose file to upload": Unread()}
_CONTROL: Mapping[str, InputKind] = {"control_net": _CONTROL_NET, "image": _IMAGE, "strength": _SCALE}

NODE_CLASSES: Mapping[str, NodeClass] = {
    "CheckpointLoaderSimple": NodeClass({"ckpt_name": _NAME}, ("MODEL", "CLIP", "VAE")),
    "UNETLoader": NodeClass(
        {"unet_name": _NAME, "weight_dtype": Choice(("default",), "weights are as the model is served")}, ("MODEL",)
    ),
    "CLIPLoader": NodeClass(
        {"clip_name": _NAME, "type": Choice(("stable_diffusion", "sd3")), "device": Unread()},
        ("CLIP",),
        optional=("type", "device"),
    ),
    "DualCLIPLoader": NodeClass(
        {"clip_name1": _NAME, "clip_name2": _NAME, "type": Choice(("sdxl", "sd3", "flux")), "device": Unread()},
        ("CLIP",),
        optional=("device",),
    ),
    "VAELoader": NodeClass({"vae_name": _NAME}, ("VAE",)),
    "LoraLoader": NodeClass(
        {
            "model": _MODEL,
            "clip": _CLIP,
            "lora_name": _NAME,
            "strength_model": Number(-MAX_SCALE, MAX_SCALE),
            "strength_clip": Number(-MAX_SCALE, MAX_SCALE),
        },
        ("MODEL", "CLIP"),
    ),
    "ControlNetLoader": NodeClass({"control_net_name": _NAME}, ("CONTROL_NET",)),
    "CLIPTextEncode": NodeClass({"clip": _CLIP, "text": Text(MAX_PROMPT_CHARACTERS)}, ("CONDITIONING",)),
    "FluxGuidance": NodeClass({"conditioning": _CONDITIONING, "guidance": _CFG}, ("CONDITIONING",)),
    "ControlNetApply": NodeClass({"conditioning": _CONDITIONING, **_CONTROL}, ("CONDITIONING",)),
    "ControlNetApplyAdvanced": NodeClass(
        {
            "positive": _CONDITIONING,
            "negative": _CONDITIONING,
            **_CONTROL,
            "start_percent": _SHARE,
            "end_percent": _SHARE,
            "vae": Link("VAE", is_optional=True),
        },
        ("CONDITIONING", "CONDITIONING"),
    ),
    "InpaintModelConditioning": NodeClass(
        {
            "positive": _CONDITIONING,
            "negative": _CONDITIONING,
            "vae": _VAE,
            "pixels": _IMAGE,
            "mask": _MASK,
            "noise_mask": Flag(),
        },
        ("CONDITIONING", "CONDITIONING", "LATENT"),
        optional=("noise_mask",),
    ),
    "EmptyLatentImage": NodeClass(_EMPTY, ("LATENT",), optional=("batch_size",)),
    "EmptySD3LatentImage": NodeClass(_EMPTY, ("LATENT",), optional=("batch_size",)),
    "VAEEncode": NodeClass({"pixels": _IMAGE, "vae": _VAE}, ("LATENT",)),
    "VAEEncodeForInpaint": NodeClass(
        {"pixels": _IMAGE, "vae": _VAE, "mask": _MASK, "grow_mask_by": Integer(0, 2 * MAX_GROW)}, ("LATENT",)
    ),
    "SetLatentNoiseMask": NodeClass({"samples": _LATENT, "mask": _MASK}, ("LATENT",)),
    "LatentUpscale": NodeClass(
        {
            "samples": _LATENT,
            "upscale_method": _METHOD,
            "width": _SIDE,
            "height": _SIDE,
            "crop": Choice(("disabled", "center")),
        },
        ("LATENT",),
    ),
    "LatentUpscaleBy": NodeClass(
        {"samples": _LATENT, "upscale_method": _METHOD, "scale_by": Number(0.01, 8)}, ("LATENT",)
    ),
    "KSampler": NodeClass({**_SAMPLING, "seed": _SEED, "denoise": _SHARE}, ("LATENT",)),
    "KSamplerAdvanced": NodeClass(
        {
            **_SAMPLING,
            "noise_seed": _SEED,
            "add_noise": _SWITCH,
            "start_at_step": Integer(0, 10000),
            "end_at_step": Integer(0, 10000),
            "return_with_leftover_noise": _SWITCH,
        },
        ("LATENT",),
    ),
    "VAEDecode": NodeClass({"samples": _LATENT, "vae": _VAE}, ("IMAGE",)),
    "LoadImage": NodeClass({"image": _NAME, **_UPLOAD}, ("IMAGE", "MASK"), optional=tuple(_UPLOAD)),
    "LoadImageMask": NodeClass(
        {"image": _NAME, "channel": Choice(("alpha", "red", "green", "blue")), **_UPLOAD},
        ("MASK",),
        optional=tuple(_UPLOAD),
    ),
    "SaveImage": NodeClass({"images": _IMAGE, "filename_prefix": Text(4096)}, optional=("filename_prefix",)),
    "PreviewImage": NodeClass({"images": _IMAGE}),
    "SaveImageWebsocket": NodeClass({"images": _IMAGE}),
}
"""Name -> class. What a graph has beside these is refused."""

RESULTS = ("SaveImage", "PreviewImage", "SaveImageWebsocket")
"""Classes that save, show or send pictures."""
