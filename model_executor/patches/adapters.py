"""LoRA adapters: reads a file into low-rank additions to a model's layers.

Files are read by the loaders of diffusers' pipelines, which know the formats of many trainers. The scale of each layer,
which the loaders leave open, follows `diffusers/utils/peft_utils.py`, but that every layer has its own alpha. Adapters
are not merged into the weights, because all adapters, and requests without one, share these. `group_patches.py` and
`module_patches.py` fit them to modules.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from diffusers.loaders import lora_pipeline
from diffusers.utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)
from diffusers.utils.state_dict_utils import StateDictType
from safetensors import safe_open
from torch import Tensor

from core.config import AdapterConfig
from core.errors import ConfigError
from core.paths import expanded
from core.sampler_defaults import LEFT_OPEN, SamplerDefaults
from model_executor.checkpoint.loader import LOAD_ERRORS
from model_executor.kernels.low_rank import LowRank
from model_executor.patches.adapter_file import MAX_TENSORS, PEFT_PREFIX, UNSUPPORTED, AdapterFile, check_bytes

MIN_RANK_LIMIT = 1024
"""The rank is limited by the layer's width, for narrow layers by this: adapters that were merged by joining them have
the sum of their ranks."""

DEFAULT_ALPHA = 8
"""peft's, of a configuration that has none."""

CHANGES_MODEL = ("pissa", "corda", "olora", "lora_ga", "loftq")
"""How values of peft's `init_lora_weights` begin with which training changes the model's own weights as well."""

CONVERT_ERRORS = (*LOAD_ERRORS, AssertionError, AttributeError, IndexError, TypeError, RecursionError)
"""What diffusers' converters raise for files that they mistake for another format."""


@dataclass(frozen=True, slots=True)
class LoraFormat:
    """How the adapters of a family are read."""

    loader: str  # a class of `diffusers.loaders.lora_pipeline`
    # What the model's scheduler can do of the settings that an adapter brings, as in ModelInfo.
    has_shift: bool = True
    takes_sigmas: bool = True
    min_steps: int = 1
    denoiser: str = "transformer"  # the denoiser's name in model_index.json, a prefix of tensor names
    text_parts: tuple[str, ...] = ()  # text encoders that an adapter may change too
    unet: Any = None  # a UNet's configuration, since some trainers number its blocks differently


NOTHING_KNOWN: Mapping[str, int] = MappingProxyType({})

_NAME_CHARACTERS = frozenset(f"{string.ascii_letters}{string.digits}_.-")

Layers = Mapping[str, LowRank]
"""Layer's name within its part -> the addition to it, float32 on the CPU; `up` includes the scale of its file."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as read from its file, not yet tied to a loaded model."""

    name: str
    source: Path
    patch: str  # the id of its patch: hex sha256 of its file
    parts: Mapping[str, Layers]  # part of the checkpoint -> the layers that it changes
    nbytes: int = 0  # that the tensors of its file take as float32
    defaults: SamplerDefaults = LEFT_OPEN  # of requests with it

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

    def converted(self, name: str, low: LowRank, device: torch.device, dtype: torch.dtype) -> LowRank:
        """An addition as it is computed with. Raises ConfigError if its numbers are too large for the dtype."""
        low = low.to(device, dtype)
        if dtype != torch.float32 and device.type != "meta" and not is_finite(low):
            raise self.refuse(f"the weights of {name} are too large for {dtype}, in which the model is computed")
        return low


# ------------------------------------------------------------------------------------------------------------ reading


def read_adapter(
    config: AdapterConfig,
    lora_format: LoraFormat,
    max_bytes: int | None = None,
    known: Mapping[str, int] = NOTHING_KNOWN,
) -> Adapter:
    """Read an adapter in the format of its model's family. max_bytes: the most that its tensors may take as float32;
    None: any. known: patch -> bytes of its tensors, of adapters that take no more memory if they are read again.
    Raises ConfigError for a file that is missing, is not a LoRA, is larger, holds numbers that are not finite, changes
    other than layers of the parts allowed, or brings settings that cannot be followed."""
    try:
        limit = None if max_bytes is None else max(max_bytes, *known.values(), 0)
        with AdapterFile.open(expanded(config.path), limit) as file:
            if file.digest not in known:
                check_bytes(file.nbytes, max_bytes)
            defaults = config.defaults.over(file.defaults)
            if reason := defaults.why_not(
                has_shift=lora_format.has_shift,
                takes_sigmas=lora_format.takes_sigmas,
                min_steps=lora_format.min_steps,
            ):
                raise ValueError(reason)
            layers = _read_layers(file, lora_format)
            return Adapter(config.name, file.path, file.digest, layers, file.nbytes, defaults)
    except (*CONVERT_ERRORS, ConfigError) as error:
        raise _refuse(config.name, Path(config.path), _reason(error)) from error


def _reason(error: Exception) -> str:
    """The error in one line. A KeyError's own text is the key alone."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, AttributeError | TypeError | IndexError | AssertionError | RecursionError):
        return f"it is of no format that is known ({type(error).__name__} while it was read)"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _refuse(name: str, path: Path, reason: str) -> ConfigError:
    return ConfigError(f"cannot use adapter {name} of {path}: {reason}")


def _read_layers(file: AdapterFile, lora_format: LoraFormat) -> dict[str, Layers]:
    """Part -> its layers; without parts that it does not change."""
    if file.config is not None:
        with safe_open(file.content, "pt") as tensors:
            state = {name.removeprefix(PEFT_PREFIX): tensors.get_tensor(name) for name in file.names}
        return {lora_format.denoiser: _make_layers(state, _Scales.of(file.config, {}))}
    options = {} if lora_format.unet is None else {"unet_config": lora_format.unet}
    loader = getattr(lora_pipeline, lora_format.loader)
    state, *alphas, metadata = loader.lora_state_dict(
        str(file.content),
        use_safetensors=True,
        local_files_only=True,
        return_alphas=True,
        return_lora_metadata=True,
        **options,
    )
    denoiser = lora_format.denoiser
    return {
        part: _make_layers(_as_peft(own, part == denoiser), _scales(part, part == denoiser, *alphas, metadata=metadata))
        for part, own in _by_part(state, lora_format).items()
    }


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
        halves.setdefault(name, {})[half] = tensor.flatten(1)
    if alone := next((name for name, pair in halves.items() if len(pair) < 2), None):
        raise ValueError(f"it holds one of lora_A and lora_B for {alone} only")
    return {name: scales.scaled(name, pair["lora_A"], pair["lora_B"]) for name, pair in halves.items()}


def _scales(
    part: str, is_denoiser: bool, alphas: Mapping[str, Any] | None = None, *, metadata: Mapping[str, Any] | None
) -> _Scales:
    """The scales of one part's layers."""
    known, config = (
        {name.removeprefix(f"{part}."): value for name, value in (its or {}).items() if name.startswith(f"{part}.")}
        for its in (alphas, metadata)
    )
    numbers = {name.removesuffix(".alpha"): _number(name, value) for name, value in known.items()}
    return _Scales.of(config, _by_layer(numbers, is_denoiser))


def _by_layer(alphas: dict[str, float], is_denoiser: bool) -> dict[str, float]:
    """Alphas by their layers. diffusers' converter of kohya's files names some by the layer's first tensor, in an older
    convention; diffusers then finds no layer for them, and gives it the most frequent one."""
    if is_denoiser:
        renamed = convert_unet_state_dict_to_peft(alphas)
    else:
        renamed = convert_state_dict_to_peft(alphas, StateDictType.DIFFUSERS_OLD)
    return {name.removesuffix(".lora_A.weight"): alpha for name, alpha in renamed.items()}


@dataclass(frozen=True, slots=True)
class _AlphaPatterns:
    """peft's `alpha_pattern`: name -> (its place in the order, its alpha). A file may have as many patterns as layers,
    so a layer's name and its ends are looked up instead of trying each pattern."""

    names: Mapping[str, tuple[int, Any]]  # of whole layers
    ends: Mapping[str, tuple[int, Any]]  # that follow a dot in a layer's name

    @classmethod
    def parse(cls, patterns: Any) -> _AlphaPatterns:
        """In peft they are regular expressions, of which one can take years: here names alone are taken, with what
        marks their ends. Raises ValueError for others."""
        if not isinstance(patterns, Mapping):
            raise ValueError("its alpha_pattern is no object")
        if len(patterns) > MAX_TENSORS:
            raise ValueError(f"its alpha_pattern has {len(patterns)} entries; at most {MAX_TENSORS} are read")
        names: dict[str, tuple[int, Any]] = {}
        ends: dict[str, tuple[int, Any]] = {}
        for place, (pattern, value) in enumerate(patterns.items()):
            plain = pattern.replace("\\.", ".").removesuffix("$")
            layer = plain.removeprefix("^")
            if not _NAME_CHARACTERS.issuperset(layer):
                raise ValueError(
                    f"its alpha_pattern {pattern[:100]!r} is a regular expression, and these are not run; write the "
                    "names of layers"
                )
            names.setdefault(layer, (place, value))
            if plain == layer:
                ends.setdefault(layer, (place, value))
        return cls(names, ends)

    def find(self, name: str) -> Any:
        """The alpha of the first pattern that matches the end of a layer's name, as in peft's `get_pattern_key`; None
        if none does."""
        found = [self.names[name]] if name in self.names else []
        if self.ends:
            ends = (name[at + 1 :] for at, character in enumerate(name) if character == ".")
            found += [self.ends[end] for end in ends if end in self.ends]
        return min(found, key=itemgetter(0))[1] if found else None


@dataclass(frozen=True, slots=True)
class _Scales:
    """Scales of an adapter's layers, from whichever source came with the file; 1 without either."""

    config: Mapping[str, Any]  # peft's LoraConfig, or empty
    patterns: _AlphaPatterns  # of the config
    alphas: Mapping[str, float]  # layer -> its alpha, or empty
    usual_alpha: float | None  # of layers without one, the most frequent; None: no layer has one

    @classmethod
    def of(cls, config: Mapping[str, Any], alphas: Mapping[str, float]) -> _Scales:
        """Raises ValueError for configurations that are not supported."""
        _check_config(config)
        patterns = _AlphaPatterns.parse(config.get("alpha_pattern") or {})
        usual = Counter(alphas.values()).most_common(1)[0][0] if alphas else None
        return cls(config, patterns, alphas, usual)

    def scaled(self, name: str, down: Tensor, up: Tensor) -> LowRank:
        if up.shape[1] != down.shape[0]:
            raise ValueError(f"lora_A and lora_B of {name} are of rank {down.shape[0]} and {up.shape[1]}")
        rank, limit = len(down), max(down.shape[1], len(up), MIN_RANK_LIMIT)
        if not 0 < rank <= limit:
            raise ValueError(f"{name} is of rank {rank}; of a layer of its size, 1 to {limit} are used")
        own = down.to(torch.float32, copy=True)  # `down` may be a view of the file's copy, and would keep all of it
        low = LowRank(own, up.float() * self._scale(name, rank))
        if not is_finite(low):
            raise ValueError(f"the weights of {name}, with their scale, are not all finite numbers")
        return low

    def _scale(self, name: str, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rank stabilisation."""
        if self.config:
            pattern = self.patterns.find(name)
            alpha = _number("lora_alpha", self.config.get("lora_alpha", DEFAULT_ALPHA) if pattern is None else pattern)
            return float(alpha / (rank**0.5 if self.config.get("use_rslora") else rank))
        if self.usual_alpha is not None:
            return self.alphas.get(name, self.usual_alpha) / rank
        return 1.0


def _check_config(config: Mapping[str, Any]) -> None:
    """Raises ValueError for an adapter that is more than additions to the model's own weights. config: peft's
    LoraConfig, or empty."""
    if config.get("use_dora"):
        raise ValueError(UNSUPPORTED["dora_scale"])
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_MODEL):
        remedy = "" if start.lower() == "loftq" else "; save it with path_initial_model_for_weight_conversion"
        raise ValueError(f"its init_lora_weights is {start[:40]}, so it is for a model with changed weights{remedy}")


def _number(name: str, value: Any) -> float:
    """A scale's number in a file or its configuration. Raises ValueError unless it is finite."""
    number = float(value.item() if isinstance(value, Tensor) else value) if _is_number(value) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"its {name} is no finite number")
    return number


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**64)


def is_finite(low: LowRank) -> bool:
    """Whether all numbers of an addition are finite."""
    return bool(low.down.isfinite().all()) and bool(low.up.isfinite().all())
