"""ComfyUI graphs in the form of its API, as its pages export them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Link = list[Any]
GraphText = dict[str, dict[str, Any]]

PROMPT, NEGATIVE = "a red hat", "grey"
SEED, OTHER_SEED = 8566257, 469771
SIDE = 64


@dataclass
class Draft:
    """A graph that is being written."""

    nodes: GraphText = field(default_factory=dict)

    def add(self, kind: str, *, output: int = 0, **inputs: Any) -> Link:
        """Add a node; returns a link to one of its outputs."""
        id_ = str(len(self.nodes) + 3)
        self.nodes[id_] = {"class_type": kind, "inputs": inputs, "_meta": {"title": kind}}
        return [id_, output]

    def checkpoint(self, name: str) -> tuple[Link, Link, Link]:
        model = self.add("CheckpointLoaderSimple", ckpt_name=f"{name}.safetensors")
        return model, other(model, 1), other(model, 2)

    def texts(self, clip: Link) -> tuple[Link, Link]:
        texts = (PROMPT, NEGATIVE)
        positive, negative = (self.add("CLIPTextEncode", clip=clip, text=text) for text in texts)
        return positive, negative

    def empty(self, kind: str = "EmptyLatentImage", width: int = SIDE, height: int = SIDE) -> Link:
        return self.add(kind, width=width, height=height, batch_size=1)

    def sampled(self, model: Link, told: tuple[Link, Link], latents: Link, **inputs: Any) -> Link:
        usual: dict[str, Any] = {
            "seed": SEED,
            "steps": 4,
            "cfg": 3.0,
            "sampler_name": "euler",
            "scheduler": "normal",
            "denoise": 1.0,
        }
        parts = {"model": model, "positive": told[0], "negative": told[1], "latent_image": latents}
        return self.add("KSampler", **(usual | inputs | parts))

    def sampled_in_part(self, model: Link, told: tuple[Link, Link], latents: Link, **inputs: Any) -> Link:
        usual: dict[str, Any] = {
            "add_noise": "enable",
            "noise_seed": SEED,
            "steps": 5,
            "cfg": 3.0,
            "sampler_name": "euler",
            "scheduler": "normal",
            "start_at_step": 0,
            "end_at_step": 10000,
            "return_with_leftover_noise": "disable",
        }
        parts = {"model": model, "positive": told[0], "negative": told[1], "latent_image": latents}
        return self.add("KSamplerAdvanced", **(usual | inputs | parts))

    def saved(self, latents: Link, vae: Link, kind: str = "SaveImage") -> GraphText:
        """The graph, with what saves a picture."""
        image = self.add("VAEDecode", samples=latents, vae=vae)
        self.add(kind, images=image, **({"filename_prefix": "ComfyUI"} if kind == "SaveImage" else {}))
        return self.nodes


def other(link: Link, output: int) -> Link:
    """Another output of the node of a link."""
    return [link[0], output]


def txt2img(model: str = "sd", latents: str = "EmptyLatentImage", **inputs: Any) -> GraphText:
    draft = Draft()
    denoiser, clip, vae = draft.checkpoint(model)
    return draft.saved(draft.sampled(denoiser, draft.texts(clip), draft.empty(latents), **inputs), vae)


def img2img(**inputs: Any) -> GraphText:
    draft = Draft()
    denoiser, clip, vae = draft.checkpoint("sd")
    pixels = draft.add("LoadImage", image="person.png", upload="image")
    latents = draft.add("VAEEncode", pixels=pixels, vae=vae)
    inputs = {"denoise": 0.5, "steps": 3} | inputs
    return draft.saved(draft.sampled(denoiser, draft.texts(clip), latents, **inputs), vae)


def inpainting(**inputs: Any) -> GraphText:
    """With a checkpoint that is none for it."""
    draft = Draft()
    denoiser, clip, vae = draft.checkpoint("sd")
    pixels = draft.add("LoadImage", image="person.png")
    mask = draft.add("LoadImageMask", image="mask.png", channel="red")
    latents = draft.add("VAEEncodeForInpaint", pixels=pixels, vae=vae, mask=mask, grow_mask_by=0)
    return draft.saved(draft.sampled(denoiser, draft.texts(clip), latents, **inputs), vae)


def masked(**inputs: Any) -> GraphText:
    """Of the picture's own transparency, by a mask that is set."""
    draft = Draft()
    denoiser, clip, vae = draft.checkpoint("sd")
    pixels = draft.add("LoadImage", image="person.png")
    latents = draft.add("VAEEncode", pixels=pixels, vae=vae)
    latents = draft.add("SetLatentNoiseMask", samples=latents, mask=other(pixels, 1))
    inputs = {"denoise": 0.5, "steps": 3} | inputs
    return draft.saved(draft.sampled(denoiser, draft.texts(clip), latents, **inputs), vae)


def inpainting_model(model: str = "inpaint", **inputs: Any) -> GraphText:
    draft = Draft()
    denoiser, clip, vae = draft.checkpoint(model)
    pixels = draft.add("LoadImage", image="person.png")
    mask = draft.add("LoadImageMask", image="mask.png", channel="red")
    positive, negative = draft.texts(clip)
    told = draft.add(
        "InpaintModelConditioning",
        positive=positive,
        negative=negative,
        vae=vae,
        pixels=pixels,
        mask=mask,
        noise_mask=True,
    )
    return draft.saved(draft.sampled(denoiser, (told, other(told, 1)), other(told, 2), **inputs), vae)


def lora(**inputs: Any) -> GraphText:
    draft = Draft()
    denoiser, clip, vae = draft.checkpoint("sd")
    strengths = {"strength_model": 0.7, "strength_clip": 0.7} | inputs
    denoiser = draft.add("LoraLoader", model=denoiser, clip=clip, lora_name="styles/hat.safetensors", **strengths)
    told = draft.texts(other(denoiser, 1))
    return draft.saved(draft.sampled(denoiser, told, draft.empty()), vae)


def controlnet(kind: str = "ControlNetApplyAdvanced", **inputs: Any) -> GraphText:
    draft = Draft()
    denoiser, clip, vae = draft.checkpoint("sd")
    net = draft.add("ControlNetLoader", control_net_name="edges.safetensors")
    image = draft.add("LoadImage", image="lines.png")
    positive, negative = draft.texts(clip)
    steered: dict[str, Any] = {"control_net": net, "image": image, "strength": 0.8}
    if kind == "ControlNetApplyAdvanced":
        steered |= {"start_percent": 0.0, "end_percent": 0.5} | inputs
        positive = draft.add(kind, positive=positive, negative=negative, **steered)
        negative = other(positive, 1)
    else:
        positive = draft.add(kind, conditioning=positive, **steered)
    return draft.saved(draft.sampled(denoiser, (positive, negative), draft.empty()), vae)


def flux(**inputs: Any) -> GraphText:
    draft = Draft()
    denoiser = draft.add("UNETLoader", unet_name="flux.safetensors", weight_dtype="default")
    clip = draft.add("DualCLIPLoader", clip_name1="t5xxl.safetensors", clip_name2="clip_l.safetensors", type="flux")
    vae = draft.add("VAELoader", vae_name="ae.safetensors")
    positive, negative = draft.texts(clip)
    positive = draft.add("FluxGuidance", conditioning=positive, guidance=2.5)
    inputs = {"cfg": 1.0, "scheduler": "simple"} | inputs
    latents = draft.empty("EmptySD3LatentImage")
    return draft.saved(draft.sampled(denoiser, (positive, negative), latents, **inputs), vae)


def sd3(**inputs: Any) -> GraphText:
    return txt2img("sd3", "EmptySD3LatentImage", **inputs)


def refined(**inputs: Any) -> GraphText:
    draft = Draft()
    base, clip, vae = draft.checkpoint("sdxl")
    refiner, refiner_clip, _ = draft.checkpoint("refiner")
    first = {"end_at_step": 3, "return_with_leftover_noise": "enable"}
    latents = draft.sampled_in_part(base, draft.texts(clip), draft.empty(), **first)
    rest = {"add_noise": "disable", "start_at_step": 3, "noise_seed": 0} | inputs
    return draft.saved(draft.sampled_in_part(refiner, draft.texts(refiner_clip), latents, **rest), vae)


def hires(kind: str = "LatentUpscale", method: str = "bilinear", **inputs: Any) -> GraphText:
    """Three steps at half the size, and the last two of four at the whole one; both pictures are saved."""
    draft = Draft()
    denoiser, clip, vae = draft.checkpoint("sd")
    told = draft.texts(clip)
    small = draft.sampled(denoiser, told, draft.empty(), steps=3)
    draft.saved(small, vae)
    how: dict[str, Any] = {"samples": small, "upscale_method": method}
    size = {"scale_by": 2.0} if kind == "LatentUpscaleBy" else {"width": 128, "height": 128, "crop": "disabled"}
    large = draft.add(kind, **how, **size)
    inputs = {"steps": 2, "denoise": 0.5, "seed": OTHER_SEED} | inputs
    return draft.saved(draft.sampled(denoiser, told, large, **inputs), vae)


def two_in_a_row(**inputs: Any) -> GraphText:
    draft = Draft()
    denoiser, clip, vae = draft.checkpoint("sd")
    told = draft.texts(clip)
    latents = draft.sampled(denoiser, told, draft.empty())
    inputs = {"steps": 2, "denoise": 0.5, "seed": OTHER_SEED} | inputs
    return draft.saved(draft.sampled(denoiser, told, latents, **inputs), vae, "PreviewImage")


GRAPHS: dict[str, Callable[[], GraphText]] = {
    "txt2img": txt2img,
    "img2img": img2img,
    "inpainting": inpainting,
    "masked": masked,
    "inpainting_model": inpainting_model,
    "lora": lora,
    "controlnet": controlnet,
    "flux": flux,
    "sd3": sd3,
    "refined": refined,
    "hires": hires,
    "enlarged": lambda: hires("LatentUpscaleBy", "nearest-exact"),
    "two_in_a_row": two_in_a_row,
}
