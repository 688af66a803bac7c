"""Writes the workflows of LegoDiffusion's evaluation (its table 2), with random weights: Stable Diffusion 3 and 3.5,
FLUX schnell and dev, each basic, with one and with two ControlNets.

As published, both Stable Diffusions have the same text encoders and VAE, and so have both FLUX. A model's text encoders
are one component.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from safetensors.torch import load_file, save_file

from benchmarks.load.workload import IMAGE
from tools.random_checkpoints import make_flux, make_sd3, t5_encoder, t5_tokenizer
from tools.random_controlnets import make_flux_controlnet, make_sd3_controlnet

SIDE = 128  # px
TEXT_TOKENS, TEXT_WIDTH = 16, 64
NETS = ("first", "second")
"""ControlNets of each model."""
HEAD_WIDTH = 64  # of larger denoisers

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


class Size(NamedTuple):
    """The shape of a base model's checkpoint. heads: attention heads of its denoiser and ControlNets. blocks: numbers
    of the denoiser's blocks, as its maker in `tools` names them. net: those of a ControlNet. text_encoder: the shape of
    its T5.
    """

    heads: int
    blocks: Mapping[str, int]
    net: Mapping[str, Any]
    text_encoder: Mapping[str, int]


Scale = Mapping[str, Size]
"""By base model; those that it lacks are of the size of `tools.random_checkpoints`."""


def _t5(num_layers: int) -> dict[str, int]:
    """The shape of a T5 text encoder whose layers take 4.2 MB each."""
    return {"d_kv": 64, "d_ff": 4096, "num_layers": num_layers, "num_heads": 16}


SMALL: Scale = {}
LARGE: Scale = dict.fromkeys(("sd3", "sd35", "schnell", "dev"), Size(6, {"num_layers": 6}, {}, _t5(16)))
_FLUX_SIZE = Size(4, {"num_layers": 4, "num_single_layers": 8}, {"layers": (1, 0)}, _t5(7))
PUBLISHED: Scale = {
    "sd3": Size(2, {"num_layers": 5}, {"num_layers": 2}, _t5(8)),
    "sd35": Size(4, {"num_layers": 5}, {"num_layers": 2}, _t5(8)),
    "schnell": _FLUX_SIZE,
    "dev": _FLUX_SIZE,
}
"""About 3 MB for each GB of the published checkpoints (`benchmarks/simulation/data/lego.json`). A ControlNet of FLUX
has an eighth of its base's weights: fewer blocks than one it cannot have."""


@dataclass(frozen=True)
class Layout:
    """What is served. catalog: file of the models. flags: of the server. workflows: served name -> fields of its
    requests. parts: served name -> the components that it uses.
    """

    catalog: Path
    flags: Sequence[str]
    workflows: Mapping[str, Mapping[str, Any]]
    parts: Mapping[str, Sequence[Part]]

    @property
    def distinct_bytes(self) -> int:
        """Bytes of all components that are served, each counted once."""
        return sum(dict(part for parts in self.parts.values() for part in parts).values())

    @property
    def separate_bytes(self) -> int:
        """Bytes of all components, each counted once for every workflow that uses it: nothing is shared then."""
        return sum(map(self.bytes_of, self.parts))

    def bytes_of(self, workflow: str) -> int:
        """Bytes of the components that a workflow uses."""
        return sum(size for _, size in self.parts[workflow])


@dataclass(frozen=True)
class _Base:
    """A base model. make, make_net: write it and one of its ControlNets, with `options`. denoiser: class of its
    transformer. sizes: that follow from its number of heads. t5: folder of its largest text encoder.
    """

    make: Callable[..., Path]
    make_net: Callable[..., Path]
    options: Mapping[str, Any]
    denoiser: Any
    sizes: Callable[[int], Mapping[str, Any]]
    t5: str


_SD3 = SD3Transformer2DModel, lambda heads: {"caption_projection_dim": HEAD_WIDTH * heads}, "text_encoder_3"
_FLUX = FluxTransformer2DModel, lambda heads: {"axes_dims_rope": (16, 24, 24)}, "text_encoder_2"
_BASES = {
    "sd3": _Base(make_sd3, make_sd3_controlnet, {"qk_norm": None}, *_SD3),
    "sd35": _Base(make_sd3, make_sd3_controlnet, {"qk_norm": "rms_norm"}, *_SD3),
    "schnell": _Base(make_flux, make_flux_controlnet, {"guidance_embeds": False}, *_FLUX),
    "dev": _Base(make_flux, make_flux_controlnet, {"guidance_embeds": True}, *_FLUX),
}


def write(folder: Path, scale: Scale = SMALL, *, are_separate: bool = False, are_written: bool = True) -> Layout:
    """Write checkpoints, a catalog and a file of workflows into a new folder. are_separate: each workflow has copies of
    its components, which a server takes for others. are_written: workflows are those of the file; otherwise those that
    the engine has.
    """
    folder.mkdir()
    (folder / "workflows.py").write_text(FILE)
    parts, catalog, controlnets = dict[str, list[Part]](), list[str](), dict[str, None]()
    for name, base in _BASES.items():
        _write_base(folder, name, base, scale.get(name))
        nets = [f"{name}-{net}" for net in NETS]
        for number in range(1 + len(nets)):
            served, its = f"{name}-{number}", [name, *nets[:number]]
            if are_separate:
                its = [_copy(folder, each, served) for each in its]
            controlnets |= dict.fromkeys(its[1:])
            catalog.append(f'[[model]]\nname = "{served}"\npath = "{its[0]}"\ncontrolnets = {json.dumps(its[1:])}\n')
            catalog += [f'workflow = "{"controlled" if number else "basic"}"\n'] if are_written else []
            parts[served] = [part for each in its for part in _parts(folder / each)]
    catalog += ["[controlnets]\n", *(f'{net} = "{net}"\n' for net in controlnets)]
    (folder / "catalog.toml").write_text("".join(catalog))
    flags = ["--catalog", str(folder / "catalog.toml")]
    return Layout(
        folder / "catalog.toml",
        [*flags, "--workflow", str(folder / "workflows.py")] if are_written else flags,
        {
            f"{name}-{number}": _fields(name, number, f"-of-{name}-{number}" if are_separate else "")
            for name in _BASES
            for number in range(1 + len(NETS))
        },
        parts,
    )


def _write_base(folder: Path, name: str, base: _Base, size: Size | None) -> None:
    """A base model and its ControlNets. size: None: small."""
    more = {"dual_attention_layers": ()} if base.make is make_sd3 else {}
    path = base.make(folder / name, text_tokens=TEXT_TOKENS, native_size=SIDE, **base.options, **more)
    sizes: dict[str, Any] = {}
    if size is not None:
        heads = {"attention_head_dim": HEAD_WIDTH, "num_attention_heads": size.heads}
        sizes = {**heads, **base.sizes(size.heads)}
        config = base.denoiser.load_config(path / "transformer") | sizes | dict(size.blocks)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            t5_encoder(t5_tokenizer(TEXT_TOKENS), TEXT_WIDTH, size.text_encoder).save_pretrained(path / base.t5)
            base.denoiser.from_config(config).save_pretrained(path / "transformer")
    for seed, net in enumerate(NETS):
        base.make_net(
            folder / f"{name}-{net}", seed=seed, **base.options, **sizes, **(size.net if size is not None else {})
        )


def _copy(folder: Path, name: str, workflow: str) -> str:
    """Copy a checkpoint; the name of the copy. Its weights are the same, and its files are not."""
    copied = f"{name}-of-{workflow}"
    shutil.copytree(folder / name, folder / copied)
    for file in (folder / copied).rglob("*.safetensors"):
        save_file(load_file(file), file, {"format": "pt", "workflow": workflow})
    return copied


def _parts(folder: Path) -> Iterator[Part]:
    """The components of a checkpoint: its text encoders, and each other folder with weights."""
    files = sorted(folder.rglob("*.safetensors"))
    for is_text in (True, False):
        mine = [file for file in files if file.parent.name.startswith("text_encoder") is is_text]
        for group in [mine] if is_text and mine else [[file] for file in mine]:
            content = hashlib.sha256(b"".join(file.read_bytes() for file in group)).hexdigest()
            yield content, sum(file.stat().st_size for file in group)


def _fields(name: str, number: int, ending: str) -> dict[str, Any]:
    """Of a request to a workflow with this number of ControlNets. ending: of their names."""
    size: dict[str, Any] = {"size": f"{SIDE}x{SIDE}"}
    if not number:
        return size
    picture = f"data:image/png;base64,{base64.b64encode(IMAGE.read_bytes()).decode()}"
    types = [f"{name}-{net}{ending}" for net in NETS[:number]]
    return size | {"control_image": [picture] * number, "control_type": types}
