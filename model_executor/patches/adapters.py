"""LoRA adapters: reads a file into low-rank additions to a model's layers.

Files are read by the loaders of diffusers' pipelines, which know the formats of many trainers. The scale of each layer,
which the loaders leave open, follows `diffusers/utils/peft_utils.py`. Adapters are not merged into the weights, because
all adapters, and requests without one, share these. `group_patches.py` and `module_patches.py` fit them to modules.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers.loaders import lora_pipeline
from diffusers.utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)
from safetensors import safe_open
from torch import Tensor

from core.config import AdapterConfig
from core.errors import ConfigError
from model_executor.checkpoint.loader import LOAD_ERRORS
from model_executor.checkpoint.weights import PICKLES
from model_executor.kernels.low_rank import LowRank

PEFT_PREFIX, PEFT_CONFIG = "base_model.model.", "adapter_config.json"
"""The prefix of tensor names in files of `PeftModel.save_pretrained`, and the file with their scale."""

USUAL_NAMES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
"""The names that diffusers and peft give to adapters, which are preferred in a folder of several files."""

CONVERT_ERRORS = (*LOAD_ERRORS, AssertionError, AttributeError, IndexError, TypeError, re.error)
"""What diffusers' converters raise for files that they mistake for another format; re.error: a file's bad pattern."""

UNSUPPORTED = {
    "dora_scale": "it is a DoRA, which changes the weights themselves",
    "lora_magnitude_vector": "it is a DoRA, which changes the weights themselves",
    "lokr_": "it is a LoKr and no LoRA",
    "hada_": "it is a LoHa and no LoRA",
}
"""Part of a tensor's name -> why files with it are not supported."""


@dataclass(frozen=True, slots=True)
class LoraFormat:
    """How the adapters of a family are read."""

    loader: str  # a class of `diffusers.loaders.lora_pipeline`
    denoiser: str = "transformer"  # the denoiser's name in model_index.json, a prefix of tensor names
    text_parts: tuple[str, ...] = ()  # text encoders that an adapter may change too
    unet: Any = None  # a UNet's configuration, since some trainers number its blocks differently


Layers = Mapping[str, LowRank]
"""Layer's name within its part -> the addition to it, float32 on the CPU; `up` includes the scale of its file."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as read from its file, not yet tied to a loaded model."""

    name: str
    source: Path
    patch: str  # the id of its patch: hex sha256 of its file
    parts: Mapping[str, Layers]  # part of the checkpoint -> the layers that it changes

    def refuse(self, reason: str) -> ConfigError:
        """The error that this adapter cannot be used."""
        return _refuse(self.name, self.source, reason)

    def check_size(self, name: str, low: LowRank, inputs: int, outputs: int) -> None:
        """Raises ConfigError unless the addition has the layer's number of inputs and outputs."""
        if (low.down.shape[1], len(low.up)) != (inputs, outputs):
            mine = f"{low.down.shape[1]} to {len(low.up)} numbers"
            raise self.refuse(
                f"it takes {name} from {mine}, the layer from {inputs} to {outputs}; it is for another model"
            )


# ------------------------------------------------------------------------------------------------------------ reading


def read_adapter(config: AdapterConfig, lora_format: LoraFormat) -> Adapter:
    """Read an adapter in the format of its model's family. Raises ConfigError for a file that is missing, is not a
    LoRA, or changes other than layers of the parts allowed."""
    path = Path(config.path).expanduser()
    try:
        file = _find(path)
        layers = _read_layers(file, lora_format)
        return Adapter(config.name, file, _digest(file), layers)
    except CONVERT_ERRORS as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise _refuse(config.name, path, reason) from error


def _refuse(name: str, path: Path, reason: str) -> ConfigError:
    return ConfigError(f"cannot use adapter {name} of {path}: {reason}")


def _find(path: Path) -> Path:
    """The safetensors file at this path, or the one in this folder. Raises ValueError."""
    if not path.exists():
        raise ValueError("there is no such file")
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = [file for file in files if file.suffix == ".safetensors"]
    usual = [file for file in found if file.name in USUAL_NAMES] or found
    if len(usual) == 1:
        return usual[0]
    if found:
        raise ValueError(f"it holds {', '.join(file.name for file in found)}; name one of these files")
    if pickles := [file for file in files if file.suffix in PICKLES]:
        raise ValueError(
            f"only safetensors weights are read, as unpickling {pickles[0].name} could run code; convert it where you "
            "trust it"
        )
    raise ValueError("a LoRA is a .safetensors file, or a folder that holds one")


def _digest(file: Path) -> str:
    """Hex sha256 of the adapter's file and its peft configuration, if any."""
    digest, config = hashlib.sha256(file.read_bytes()), file.with_name(PEFT_CONFIG)
    if config.is_file():
        digest.update(config.read_bytes())
    return digest.hexdigest()


def _read_layers(file: Path, lora_format: LoraFormat) -> dict[str, Layers]:
    """Part -> its layers; without parts that it does not change."""
    with safe_open(file, "pt") as tensors:
        names = list(tensors.keys())
        is_peft = file.with_name(PEFT_CONFIG).is_file() and all(name.startswith(PEFT_PREFIX) for name in names)
        _check_kind(names)
        if is_peft:
            state = {name.removeprefix(PEFT_PREFIX): tensors.get_tensor(name) for name in names}
    if is_peft:
        config = json.loads(file.with_name(PEFT_CONFIG).read_text("utf-8"))
        return {lora_format.denoiser: _make_layers(state, _Scales(config, {}))}
    options = {} if lora_format.unet is None else {"unet_config": lora_format.unet}
    loader = getattr(lora_pipeline, lora_format.loader)
    state, *alphas, metadata = loader.lora_state_dict(
        str(file), use_safetensors=True, local_files_only=True, return_alphas=True, return_lora_metadata=True, **options
    )
    return {
        part: _make_layers(_as_peft(own, part == lora_format.denoiser), _scales(part, *alphas, metadata=metadata))
        for part, own in _by_part(state, lora_format).items()
    }


def _check_kind(names: list[str]) -> None:
    for part, reason in UNSUPPORTED.items():
        if any(part in name for name in names):
            raise ValueError(reason)


def _by_part(state: Mapping[str, Tensor], lora_format: LoraFormat) -> dict[str, dict[str, Tensor]]:
    """Part -> its tensors. Raises ValueError for a tensor of a part that may not be changed, and for an empty file."""
    parts: dict[str, dict[str, Tensor]] = {lora_format.denoiser: {}}
    for key, tensor in state.items():
        part, _, name = key.partition(".")
        if part in (lora_format.denoiser, *lora_format.text_parts):
            parts.setdefault(part, {})[name] = tensor
        elif part.startswith("text_encoder"):
            only = f"only the {lora_format.denoiser} is"
            raise ValueError(f"it changes the text encoder ({key}), which is not supported: {only}")
        else:
            raise ValueError(f"{key} is no part of a LoRA for this model's layers")
    if not (found := {part: own for part, own in parts.items() if own}):
        raise ValueError("it holds nothing for this model")
    return found


def _as_peft(state: dict[str, Tensor], is_denoiser: bool) -> dict[str, Tensor]:
    """A part's tensors, renamed from older conventions to peft's as in `PeftAdapterMixin.load_lora_adapter` and
    `_load_lora_into_text_encoder`."""
    if any("lora_A" in name for name in state):
        return state
    if is_denoiser:
        return dict(convert_unet_state_dict_to_peft(state))
    return dict(convert_state_dict_to_peft(convert_state_dict_to_diffusers(state)))


def _make_layers(state: Mapping[str, Tensor], scales: _Scales) -> dict[str, LowRank]:
    """Layer -> its addition. Raises ValueError for tensors that are not low-rank additions to a layer."""
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        name, _, half = key.removesuffix(".weight").rpartition(".")
        if half not in ("lora_A", "lora_B") or not key.endswith(".weight"):
            raise ValueError(f"{key} is no part of a LoRA for this model's layers")
        halves.setdefault(name, {})[half] = tensor.flatten(1).float()
    if alone := next((name for name, pair in halves.items() if len(pair) < 2), None):
        raise ValueError(f"it holds one of lora_A and lora_B for {alone} only")
    return {name: scales.scaled(name, pair["lora_A"], pair["lora_B"]) for name, pair in halves.items()}


def _scales(part: str, alphas: Mapping[str, Any] | None = None, *, metadata: Mapping[str, Any] | None) -> _Scales:
    """The scales of one part's layers."""
    known, config = (
        {name.removeprefix(f"{part}."): value for name, value in (its or {}).items() if name.startswith(f"{part}.")}
        for its in (alphas, metadata)
    )
    return _Scales(config, {name.removesuffix(".alpha"): float(value) for name, value in known.items()})


@dataclass(frozen=True, slots=True)
class _Scales:
    """Scales of an adapter's layers, from whichever source came with the file; 1 without either."""

    config: Mapping[str, Any]  # peft's LoraConfig, or empty
    alphas: Mapping[str, float]  # layer -> its alpha, or empty

    def scaled(self, name: str, down: Tensor, up: Tensor) -> LowRank:
        if up.shape[1] != down.shape[0]:
            raise ValueError(f"lora_A and lora_B of {name} are of rank {down.shape[0]} and {up.shape[1]}")
        return LowRank(down, up * self._scale(name, len(down)))

    def _scale(self, name: str, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rank stabilisation."""
        if self.config.get("use_dora"):
            raise ValueError(UNSUPPORTED["dora_scale"])
        if self.config:
            pattern = _matching(self.config.get("alpha_pattern") or {}, name)
            alpha = float(self.config["lora_alpha"] if pattern is None else pattern)
            return float(alpha / (rank**0.5 if self.config.get("use_rslora") else rank))
        if self.alphas:
            usual = Counter(self.alphas.values()).most_common(1)[0][0]
            return self.alphas.get(name, usual) / rank
        return 1.0


def _matching(patterns: Mapping[str, Any], name: str) -> Any:
    """The value of the first pattern that matches the end of a layer's name, as in peft's `get_pattern_key`."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), None)
