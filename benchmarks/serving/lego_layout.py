"""Writes the workflows of LegoDiffusion's evaluation (its table 2), with random weights: Stable Diffusion 3 and 3.5,
FLUX schnell and dev, each basic, with one and with two ControlNets.

As published, both Stable Diffusions have the same text encoders and VAE, and so have both FLUX. A model's text encoders
are one component.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel

from benchmarks.load.workload import IMAGE
from tools.random_checkpoints import make_flux, make_sd3, t5_encoder, t5_tokenizer
from tools.random_controlnets import make_flux_controlnet, make_sd3_controlnet

SIDE = 128  # px
TEXT_TOKENS, TEXT_WIDTH = 16, 64
NETS = ("first", "second")
"""ControlNets of each model."""
LARGE_LAYERS = 6  # of large denoisers

FILE = """
from entrypoints.workflows import Image, Workflow, steps
from entrypoints.workflows.families import VAE, ControlNet, Denoiser, LatentsGenerator, TextEncoder, denoise

def written(name, is_controlled):
    with Workflow(name=name) as workflow:
        denoiser, controlnet, vae = Denoiser(), ControlNet(), VAE()
        latents = LatentsGenerator()(workflow.add_input("seed", int))
        prompt_embeds = TextEncoder()(workflow.add_input("prompt", str))
        if is_controlled:
            ref_image = vae(image=workflow.add_input("ref_image", Image), mode="encode")
        for _ in steps(workflow.add_input("num_inference_steps", int)):
            added = {"controlnet_outputs": controlnet(latents, prompt_embeds, ref_image)} if is_controlled else {}
            latents = denoise(denoiser(latents, prompt_embeds, **added), latents)
        workflow.add_output(vae(latents, mode="decode"), name="picture")
        return workflow

basic, controlled = written("basic", False), written("controlled", True)
"""

Part = tuple[str, int]
"""Digest of a component's files with weights, and their bytes."""


@dataclass(frozen=True)
class Scale:
    """Sizes of denoisers and ControlNets, and of T5; empty: those of `tools.random_checkpoints`."""

    heads: Mapping[str, Any] = field(default_factory=dict)
    text_encoder: Mapping[str, int] = field(default_factory=dict)


SMALL = Scale()
LARGE = Scale(
    {"attention_head_dim": 64, "num_attention_heads": 6},
    {"d_kv": 64, "d_ff": 4096, "num_layers": 16, "num_heads": 16},
)


@dataclass(frozen=True)
class Layout:
    """What is served. flags: of the server. workflows: served name -> fields of its requests. distinct_bytes: files of
    components, each once. separate_bytes: each once for every workflow that uses it.
    """

    flags: Sequence[str]
    workflows: Mapping[str, Mapping[str, Any]]
    distinct_bytes: int
    separate_bytes: int


@dataclass(frozen=True)
class _Base:
    """A base model. make, make_net: write it and one of its ControlNets, with `options`. denoiser: class of its
    transformer. large: sizes that follow from 6 heads of width 64. t5: folder of its largest text encoder.
    """

    make: Callable[..., Path]
    make_net: Callable[..., Path]
    options: Mapping[str, Any]
    denoiser: Any
    large: Mapping[str, Any]
    t5: str


_SD3 = SD3Transformer2DModel, {"caption_projection_dim": 384}, "text_encoder_3"
_FLUX = FluxTransformer2DModel, {"axes_dims_rope": (16, 24, 24)}, "text_encoder_2"
_BASES = {
    "sd3": _Base(make_sd3, make_sd3_controlnet, {"qk_norm": None}, *_SD3),
    "sd35": _Base(make_sd3, make_sd3_controlnet, {"qk_norm": "rms_norm"}, *_SD3),
    "schnell": _Base(make_flux, make_flux_controlnet, {"guidance_embeds": False}, *_FLUX),
    "dev": _Base(make_flux, make_flux_controlnet, {"guidance_embeds": True}, *_FLUX),
}


def write(folder: Path, scale: Scale = SMALL) -> Layout:
    """Write checkpoints, a catalog and a file of workflows into a new folder."""
    folder.mkdir()
    (folder / "workflows.py").write_text(FILE)
    used, catalog = list[Part](), list[str]()
    for name, base in _BASES.items():
        _write_base(folder, name, base, scale)
        nets = [f"{name}-{net}" for net in NETS]
        for number in range(1 + len(nets)):
            workflow = "controlled" if number else "basic"
            catalog.append(f'[[model]]\nname = "{name}-{number}"\npath = "{name}"\nworkflow = "{workflow}"\n')
            catalog.append(f"controlnets = {json.dumps(nets[:number])}\n")
            used += [part for each in (name, *nets[:number]) for part in _parts(folder / each)]
    catalog += ["[controlnets]\n", *(f'{name}-{net} = "{name}-{net}"\n' for name in _BASES for net in NETS)]
    (folder / "catalog.toml").write_text("".join(catalog))
    return Layout(
        ["--catalog", str(folder / "catalog.toml"), "--workflow", str(folder / "workflows.py")],
        {f"{name}-{number}": _fields(name, number) for name in _BASES for number in range(1 + len(NETS))},
        sum(dict(used).values()),
        sum(size for _, size in used),
    )


def _write_base(folder: Path, name: str, base: _Base, scale: Scale) -> None:
    """A base model and its ControlNets."""
    more = {"dual_attention_layers": ()} if base.make is make_sd3 else {}
    path = base.make(folder / name, text_tokens=TEXT_TOKENS, native_size=SIDE, **base.options, **more)
    sizes = {**scale.heads, **base.large} if scale.heads else {}
    if sizes:
        config = base.denoiser.load_config(path / "transformer") | sizes | {"num_layers": LARGE_LAYERS}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            t5_encoder(t5_tokenizer(TEXT_TOKENS), TEXT_WIDTH, scale.text_encoder).save_pretrained(path / base.t5)
            base.denoiser.from_config(config).save_pretrained(path / "transformer")
    for seed, net in enumerate(NETS):
        base.make_net(folder / f"{name}-{net}", seed=seed, **base.options, **sizes)


def _parts(folder: Path) -> Iterator[Part]:
    """The components of a checkpoint: its text encoders, and each other folder with weights."""
    files = sorted(folder.rglob("*.safetensors"))
    for is_text in (True, False):
        mine = [file for file in files if file.parent.name.startswith("text_encoder") is is_text]
        for group in [mine] if is_text and mine else [[file] for file in mine]:
            content = hashlib.sha256(b"".join(file.read_bytes() for file in group)).hexdigest()
            yield content, sum(file.stat().st_size for file in group)


def _fields(name: str, number: int) -> dict[str, Any]:
    """Of a request to a workflow with this number of ControlNets."""
    size: dict[str, Any] = {"size": f"{SIDE}x{SIDE}"}
    if not number:
        return size
    picture = f"data:image/png;base64,{base64.b64encode(IMAGE.read_bytes()).decode()}"
    return size | {"control_image": [picture] * number, "control_type": [f"{name}-{net}" for net in NETS[:number]]}
