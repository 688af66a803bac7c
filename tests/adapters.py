"""Builds small random LoRA adapters for the checkpoints of `tools.random_checkpoints`, in the layouts that trainers
write.
"""

from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

STRENGTH = 0.6
"""Size of an adapter's additions relative to a layer's weights: enough for a clearly different picture."""

RANK = 4

TEXT_LAYERS = r".*(self_attn\.[qkv]_proj|mlp\.fc[12])"


def make_lora(
    path: Path,
    checkpoint: Path,
    layers: str = ".*",
    *,
    seed: int = 1,
    alpha: float | None = None,
    text_parts: Sequence[str] = (),
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write an adapter of `layers`, a regular expression, as diffusers' `save_lora_weights` does, and return its file.
    alpha: as some trainers write it beside each layer. text_parts: text encoders that it changes too. metadata: of
    the file."""
    denoiser = _denoiser(checkpoint)
    halves = _halves(checkpoint, layers, seed)
    alphas = {} if alpha is None else {f"{denoiser}.{name}.alpha": torch.tensor(alpha) for name in halves}
    texts = (_named(_halves(checkpoint, TEXT_LAYERS, seed, part), f"{part}.") for part in text_parts)
    return _save(path, dict(ChainMap(_named(halves, f"{denoiser}."), alphas, *texts)), metadata)


def make_peft_lora(folder: Path, checkpoint: Path, layers: str = ".*", *, seed: int = 1, alpha: float = RANK) -> Path:
    """As `make_lora`, but a folder as peft's `save_pretrained` writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder / "adapter_model.safetensors", _named(_halves(checkpoint, layers, seed), "base_model.model."))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha, "alpha_pattern": {"proj_mlp": 2 * alpha}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def make_kohya_lora(
    path: Path, *, seed: int = 1, width: int = 64, mlp: int = 4, alpha: float = 2.0, text: bool = False
) -> Path:
    """As `make_lora`, but for a FLUX model's first double block, as kohya's scripts write it: with other names, and
    queries, keys and values as one layer. mlp: how many times the width the MLP has. text: whether it changes the text
    encoder too.
    """
    shapes = {"img_attn_qkv": (3 * width, width), "txt_attn_proj": (width, width), "img_mlp_0": (mlp * width, width)}
    shapes = {f"lora_unet_double_blocks_0_{name}": shape for name, shape in shapes.items()}
    if text:
        shapes["lora_te1_text_model_encoder_layers_0_self_attn_q_proj"] = (width, width)
    tensors: dict[str, Tensor] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        down, up = _random(shape, torch.Generator().manual_seed(seed * 1000 + number))
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return _save(path, tensors)


def make_kohya_unet_lora(
    path: Path, checkpoint: Path, layers: Mapping[str, str], *, seed: int = 1, alpha: float = 2.0
) -> Path:
    """As `make_kohya_lora`, for a UNet and its text encoders. layers: kohya's name -> the checkpoint's name within its
    part.
    """
    tensors: dict[str, Tensor] = {}
    for number, (name, layer) in enumerate(layers.items()):
        part, _, rest = layer.partition(".")
        ((down, up),) = _halves(checkpoint, re.escape(rest), seed * 1000 + number, part).values()
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return _save(path, tensors)


def _denoiser(checkpoint: Path) -> str:
    return "unet" if (checkpoint / "unet").is_dir() else "transformer"


def _halves(checkpoint: Path, layers: str, seed: int, part: str = "") -> dict[str, tuple[Tensor, Tensor]]:
    """The matrices A, B for a linear layer or convolution of a part, by default of the denoiser."""
    generator = torch.Generator().manual_seed(seed)
    (file,) = (checkpoint / (part or _denoiser(checkpoint))).glob("*.safetensors")
    with safe_open(file, "pt") as weights:
        shapes = {_name(part, key): weights.get_slice(key).get_shape() for key in weights.keys()}  # noqa: SIM118
    wanted = {name: shape for name, shape in shapes.items() if len(shape) > 1 and re.fullmatch(layers, name)}
    for parameter in ("pos_embed.pos_embed", "x_pad_token", "cap_pad_token"):
        wanted.pop(parameter, None)
    assert wanted, f"no layer is called {layers}"
    return {name: _random(shape, generator) for name, shape in wanted.items()}


def _name(part: str, key: str) -> str:
    """The name of a text encoder's layer as trainers write it: transformers 5 drops the first part of some names."""
    name = key.removesuffix(".weight")
    return f"text_model.{name.removeprefix('text_model.')}" if part.startswith("text_encoder") else name


def _random(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    outputs, *inputs = shape
    down = torch.randn(RANK, *inputs, generator=generator) / RANK**0.5
    up = torch.randn(outputs, RANK, *[1] * len(inputs[1:]), generator=generator)
    return down, up * STRENGTH / down[0].numel() ** 0.5


def _named(halves: dict[str, tuple[Tensor, Tensor]], prefix: str) -> dict[str, Tensor]:
    names = {f"{prefix}{name}.lora_A.weight": down for name, (down, _) in halves.items()}
    return names | {f"{prefix}{name}.lora_B.weight": up for name, (_, up) in halves.items()}


def _save(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {**(metadata or {})})
    return path
