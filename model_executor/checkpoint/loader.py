"""Reads diffusers checkpoints part by part: a directory, or a Hugging Face hub id that is downloaded. A checkpoint of
one model that finds masks, or of a ControlNet, is read as if it had an index that names this one part.

Only safetensors weights are read. Every fault of a checkpoint is reported as a ConfigError of one line. Parts are
loaded with the classes of diffusers and transformers, imported from their submodules, because the packages as a whole
take seconds to import.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor

from core.config import CudaGraphs, KernelChoice, ModelConfig, Offload, Quantization
from core.errors import ConfigError
from core.ipc.limits import memory_limit
from core.paths import expanded
from model_executor.checkpoint.file_parameters import loaded_bytes
from model_executor.checkpoint.formats import check_format, why_not_file, why_not_folder
from model_executor.checkpoint.hub import CONFIG, DEFAULTS, INDEX, download, one_part_class
from model_executor.checkpoint.quantization import (
    BYTES_PER_WEIGHT,
    INSTEAD,
    QUANTIZED,
    check_method,
    check_quantized,
    check_wish,
    for_device,
    load_options,
    stored_method,
)
from model_executor.checkpoint.tokenizer_check import check_files, check_json, check_tokenizer
from model_executor.checkpoint.weight_shapes import differing_shape
from model_executor.checkpoint.weights import (
    check_pickles,
    check_shards,
    check_whole,
    choose_variant,
    read_tensors,
    usual_variant,
    variants,
    weight_files,
)
from model_executor.cpu import cpu_has_amx, cpu_has_bfloat16
from model_executor.device_failures import is_out_of_memory
from model_executor.devices import resolve_device
from model_executor.kernels.cpu_kernels import has_tiles
from model_executor.models.parts import CONTROLNETS, IN_PLACE_OF, MODULES, SEGMENTERS, Classes

# diffusers' own ControlNet of FLUX makes one, and only its authors can change that.
warnings.filterwarnings("ignore", "`FluxPosEmbed` is deprecated", FutureWarning)

WEIGHTS_SHARE = 2 / 3
"""Of the machine's memory that weights may take in float32 where `auto` prefers it; the rest is for computing."""

ONE_PART, CONTROLNET_PART = "segmenter", "controlnet"
"""The name of the part of a checkpoint that has only one: of a segmenter, and of a ControlNet."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CONFIGURATION_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    StrictDataclassError,
)
"""Exceptions that entries of a configuration cause when they are missing or of the wrong type."""

LOAD_ERRORS = (*CONFIGURATION_ERRORS, OSError, ImportError, SafetensorError)
"""What diffusers, transformers and safetensors raise for files that are missing, truncated or of another shape, and
for packages that are missing or too old."""


CONFIGURATIONS = {
    "scheduler": ("scheduler_config.json",),
    "processor": ("preprocessor_config.json", "processor_config.json"),
}
"""Part without weights or vocabulary -> its configuration file, which may have any of these names."""


class Defaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's own defaults, from an optional generation_config.json. None: the default of its family's pipeline."""

    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    native_size: int | None = None  # side in pixels of the square it was trained on; None: from its configuration


@dataclass(frozen=True, slots=True)
class ModelCheckpoint:
    """An opened checkpoint: its files and index, and the settings that its parts are loaded with."""

    # What the checkpoint is.
    path: Path
    index: dict[str, Any]  # model_index.json
    defaults: Defaults

    # How it is used, from the ModelConfig.
    dtype: torch.dtype  # to compute in
    device: torch.device
    variant: str = ""  # of the weights, for parts that have it
    quantization: Quantization = "none"  # of the denoiser, done while it is loaded
    kernels: KernelChoice = "auto"  # that the denoiser computes with
    cuda_graphs: CudaGraphs = "auto"  # of its steps
    offload: Offload = "none"  # of text encoders and VAE
    batch_invariant: bool = False  # whether its bits must not depend on what shares a step
    why_dtype: str = ""  # why `auto` is this dtype; "": it was asked for

    @classmethod
    def open(
        cls, model: ModelConfig, device_index: int = 0, num_workers: int = 1, model_bytes: int = 0
    ) -> ModelCheckpoint:
        """Find the checkpoint and read its index; a hub id is downloaded first. device_index, num_workers: as for
        `resolve_device`. model_bytes: that its weights may take; 0: no limit. Raises ConfigError.
        """
        device = resolve_device(model.device, device_index, num_workers)  # before a download
        if model.offload == "host" and device.type == "cpu":
            raise ConfigError("--offload host: on a CPU all weights are in host memory anyway; leave it out")
        path = _locate(model.model, model.variant)
        index = _read_index(path)
        dtype, why = resolve_dtype(model.dtype, device, lambda: _float32_bytes(path, model), model_bytes, model.kernels)
        computing = model.kernels, model.cuda_graphs, model.offload, model.batch_invariant
        defaults, wishes = _read_defaults(path), (model.variant, model.quantization, *computing)
        checkpoint = cls(path, index, defaults, dtype, device, *wishes, why_dtype=why)
        checkpoint._check_variant()
        return checkpoint

    @property
    def class_name(self) -> str:
        """The diffusers pipeline this checkpoint is for, or the class of its one part."""
        return str(self.index["_class_name"])

    def folder(self, part: str) -> Path:
        """The folder of a part's files: the checkpoint's own if it has one part."""
        return self.path / self._subfolder(part)

    def _subfolder(self, part: str) -> str:
        return "" if self.class_name in (*SEGMENTERS.values(), *CONTROLNETS) else part

    def config(self, part: str) -> dict[str, Any]:
        """A part's config.json. Raises ConfigError."""
        self._check_part(part)
        return _read_json(self.folder(part) / CONFIG)

    def has(self, part: str) -> bool:
        """Whether the checkpoint contains an optional part."""
        return self._class_name(part) is not None

    def _class_name(self, part: str) -> str | None:
        """A part's class in the index; None if the index has none."""
        match self.index.get(part):
            case [_, str(name)]:
                return name
            case _:
                return None

    def load(self, part: str) -> Any:
        """Load a part by its name in model_index.json: modules on the device in the chosen dtype, tokenizers and
        schedulers as they are. Raises ConfigError, and out-of-memory errors (see `is_out_of_memory`)."""
        self._check_part(part)
        cls, default_dtype = self._class_of(part), torch.get_default_dtype()
        try:
            if issubclass(cls, torch.nn.Module):
                return self._load_module(cls, part)
            if hasattr(cls, "vocab_files_names"):
                return self._load_tokenizer(cls, part)
            return self._load_configured(cls, part)
        except LOAD_ERRORS as error:
            if is_out_of_memory(error):
                raise  # the files are not at fault
            raise ConfigError(f"cannot load {part} of {self.path}: {first_line(error)}") from error
        finally:
            torch.set_default_dtype(default_dtype)  # diffusers sets it while it loads, and leaves it when that fails

    def tensors(self, part: str, names: Collection[str]) -> dict[str, Tensor]:
        """Single weights of a part by name, as they are stored, without loading the part. Raises ConfigError."""
        self._check_part(part)
        try:
            return read_tensors(weight_files(self.folder(part), self.variant_of(part)), names)
        except LOAD_ERRORS as error:
            raise ConfigError(f"cannot load {part} of {self.path}: {first_line(error)}") from error

    def check_classes(self, classes: Classes) -> None:
        """Raises ConfigError if a part in the index has a class that its family does not support; loads nothing."""
        for part, supported in classes.items():
            if self.has(part) and (name := self._class_name(part)) not in supported:
                raise ConfigError(f"{self.path}: {part} is of class {name}; supported: {', '.join(supported)}")

    def check_formats(self) -> None:
        """Raises ConfigError if a part's weights are in a format that is not read. Packages for quantisation store
        scales and 8-bit floats of their own."""
        for part in (part for part in self.index if self._class_name(part) in MODULES):
            if self._stored_method(part) is None:
                folder = self.folder(part)
                check_format(folder, weight_files(folder, usual_variant(folder, self.variant)))

    def check_quantization(self) -> None:
        """Raises ConfigError if parts that are quantised, now or in their files, cannot be used here. Called before
        minutes are spent on loading."""
        denoiser = next(part for part in QUANTIZED if self.has(part))
        check_wish(self.quantization, denoiser, self._stored_method(denoiser), self.device)
        if self.batch_invariant and self.device.type == "cuda" and self.is_quantized(denoiser):
            remedy = "serve it unquantised, or leave --batch-invariant out"
            raise ConfigError(f"--batch-invariant cannot hold where the {denoiser} is quantised; {remedy}")
        for part, value in self.index.items():
            if isinstance(value, list) and (method := self._stored_method(part)) is not None:
                check_method(method, f"{part} of {self.path} is quantised with {method}", self.device)

    def outline(self, part: str) -> torch.nn.Module:
        """A part's module on the meta device: all layers, no weights. Raises ConfigError."""
        cls = self._class_of(part)
        try:
            with torch.device("meta"):
                config = self.config(part)
                config.pop("quantization_config", None)
                is_diffusers = hasattr(cls, "from_config")
                return cls.from_config(config) if is_diffusers else cls(cls.config_class.from_dict(config))  # type: ignore[no-any-return]
        except LOAD_ERRORS as error:
            raise ConfigError(f"cannot make {part} of {self.path}: {first_line(error)}") from error

    def is_quantized(self, part: str) -> bool:
        """Whether a part is quantised, in its files or while it is loaded."""
        return (self.quantization != "none" and part in QUANTIZED) or self._stored_method(part) is not None

    def is_offloaded(self, part: str) -> bool:
        """Whether a part's weights lie in host memory between uses: not those of the denoiser, which every step uses,
        and no quantised ones, which cannot always be moved."""
        return self.offload == "host" and part not in QUANTIZED and not self.is_quantized(part)

    def home_of(self, part: str) -> torch.device:
        """The device that a part is loaded to."""
        return torch.device("cpu") if self.is_offloaded(part) else self.device

    def expected_bytes(self, part: str) -> int:
        """Bytes that a part's weights will take at least, as its files' headers say. Raises ConfigError for a file that
        cannot be read."""
        quantization = self.quantization if part in QUANTIZED else "none"
        return _part_bytes(self.folder(part), self.variant, quantization, self.dtype.itemsize)

    @property
    def config_as_opened(self) -> ModelConfig:
        """A ModelConfig that opens the same checkpoint with the same settings, on the CPU."""
        return ModelConfig(
            model=str(self.path),
            variant=self.variant,
            dtype=str(self.dtype).removeprefix("torch."),
            quantization=self.quantization,
            kernels=self.kernels,
            cuda_graphs=self.cuda_graphs,
            batch_invariant=self.batch_invariant,
            device="cpu",
        )

    def _load_tokenizer(self, cls: Any, part: str) -> Any:
        """Raises ValueError for a tokenizer that is damaged or would not distinguish prompts."""
        folder = self.folder(part)
        check_json(folder)
        check_files(folder, cls)
        try:
            tokenizer = cls.from_pretrained(self.path, subfolder=part, local_files_only=True)
        except Exception as error:  # tokenizers raises nothing more specific
            raise ValueError(f"its files are damaged ({first_line(error)}); fetch them again") from error
        check_tokenizer(tokenizer, self.config(part.replace("tokenizer", "text_encoder")))
        return tokenizer

    def _load_configured(self, cls: Any, part: str) -> Any:
        """Load a scheduler or a processor. Raises ValueError if its configuration is missing or damaged."""
        names = CONFIGURATIONS[part]
        if not any((self.folder(part) / name).is_file() for name in names):
            raise ValueError(f"it has no {' or '.join(names)}; is the checkpoint complete?")
        check_json(self.folder(part))
        try:
            return cls.from_pretrained(self.path, subfolder=part, local_files_only=True)
        except OSError as error:  # the files exist, so they describe another class
            raise ValueError(f"{' or '.join(names)} describes no {cls.__name__}; fetch it again") from error

    def _load_module(self, cls: Any, part: str) -> torch.nn.Module:
        wish = self.quantization if part in QUANTIZED else "none"
        is_quantized = self.is_quantized(part)
        options = load_options(wish, self.device, self.dtype) if is_quantized else {}
        module = self._read_module(cls, part, options)
        if wish != "none":
            check_quantized(module, wish)
        if not is_quantized:
            module = module.to(self.home_of(part))
        elif part in QUANTIZED:
            module = for_device(module, self.device)
        return module.eval().requires_grad_(False)

    def _read_module(self, cls: Any, part: str, options: Mapping[str, Any]) -> torch.nn.Module:
        """Load a module with its weights. Raises ValueError if some are missing or of another shape."""
        variant = self.variant_of(part)
        try:
            module, report = cls.from_pretrained(
                self.path,
                subfolder=self._subfolder(part),
                use_safetensors=True,
                variant=variant or None,
                local_files_only=True,
                output_loading_info=True,
                dtype=self.dtype,
                **options,
            )
        except LOAD_ERRORS as error:
            if is_out_of_memory(error) or self._stored_method(part) is not None:
                raise
            if (reason := differing_shape(self.outline(part), weight_files(self.folder(part), variant))) is None:
                raise
            raise ValueError(reason) from error
        if report["missing_keys"]:
            raise ValueError(f"the weights lack {sorted(report['missing_keys'])[0]}")
        return module  # type: ignore[no-any-return]

    def variant_of(self, part: str) -> str:
        """The variant of the weights that a part is loaded from, "" for unnamed ones. Raises ValueError if they
        cannot be used."""
        folder = self.folder(part)
        check_pickles(folder)
        variant = choose_variant(folder, self.variant)
        check_shards(folder, variant)
        check_whole(folder, variant)
        return variant

    def _check_variant(self) -> None:
        """Raises ConfigError if no part has the variant that was asked for."""
        folders = [self.folder(part) for part, value in self.index.items() if isinstance(value, list)]
        found = {name for folder in folders for name in variants(folder)}
        if self.variant and self.variant not in found:
            there = ", ".join(sorted(name for name in found if name)) or "none with a name"
            raise ConfigError(f"{self.path} has no weights of the variant {self.variant}; there: {there}")

    def _stored_method(self, part: str) -> str | None:
        """The method that a part's weights are quantised with in their files, None if they are not."""
        file = self.folder(part) / CONFIG
        return stored_method(_read_json(file)) if file.is_file() else None

    def _check_part(self, part: str) -> None:
        if not self.has(part):
            raise ConfigError(f"{self.path}: {INDEX} names no {part}, which {self.class_name} cannot do without")
        if not self.folder(part).is_dir():
            raise ConfigError(f"{self.path} lacks {part}, which its {INDEX} names; is the checkpoint complete?")

    def _class_of(self, part: str) -> Any:
        name = self._class_name(part)
        if name not in MODULES:
            raise ConfigError(f"{self.path}: {part} is of class {name}, which is not supported")
        return getattr(importlib.import_module(MODULES[name]), IN_PLACE_OF.get(name, name))


def resolve_dtype(
    name: str,
    device: torch.device,
    float32_bytes: Callable[[], int],
    model_bytes: int = 0,
    kernels: KernelChoice = "auto",
) -> tuple[torch.dtype, str]:
    """The dtype of a --dtype value, and why it is that; "" for any but `auto`, which is bfloat16 on a GPU, on CPUs that
    multiply it natively, with AMX only by our compiled kernels, and where weights do not fit into memory otherwise;
    else float32. float32_bytes: that all weights would take. model_bytes: that they may take; 0: as the machine's
    memory allows. kernels: as chosen for denoisers. Raises ConfigError for an unknown name.

    On one Zen 4 core, an exact step of FLUX-shaped blocks of width 512 took 1,234 ms in float32 and 606 ms in bfloat16,
    and one at mask ratio 0.05 145 ms and 81 ms (`make bench-step ARGS=--dtypes`). In both, an edit's bits do not depend
    on the other requests in its batches.
    With AMX they do in bfloat16 where oneDNN multiplies: it rounds products of few and of many rows differently, and
    pictures differ by up to 3 of 255. Steps of few tokens are slower there than in float32, too.
    """
    if name == "auto":
        return _auto_dtype(device, float32_bytes, model_bytes, kernels)
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[name], ""


def _auto_dtype(
    device: torch.device, float32_bytes: Callable[[], int], model_bytes: int, kernels: KernelChoice
) -> tuple[torch.dtype, str]:
    if device.type != "cpu":
        return torch.bfloat16, "the model runs on a GPU"
    if not cpu_has_bfloat16():
        return torch.float32, "this CPU does not multiply bfloat16"
    if not cpu_has_amx():
        return torch.bfloat16, "this CPU multiplies it natively"
    if kernels != "torch" and has_tiles():
        return torch.bfloat16, "this CPU multiplies it natively, with AMX"
    needed, limit = float32_bytes(), int(WEIGHTS_SHARE * memory_limit())
    limit = min(limit, model_bytes or limit)
    promise = "without compiled kernels or with several threads, a picture in bfloat16 depends on what shares its steps"
    if needed <= limit:
        return torch.float32, promise
    sizes = f"in float32 the weights take {needed / 1e9:.1f} GB, and {limit / 1e9:.1f} GB of memory are for them"
    return torch.bfloat16, f"{sizes}; {promise}"


def _float32_bytes(path: Path, model: ModelConfig) -> int:
    """Bytes of all weights of a checkpoint if those that are not quantised are float32. A part that cannot be read
    counts nothing: loading reports it."""
    total = 0
    folders = [path] if one_part_class(path) else [each for each in path.iterdir() if each.is_dir() and variants(each)]
    for folder in folders:
        with suppress(ConfigError, *LOAD_ERRORS):
            total += _part_bytes(folder, model.variant, model.quantization, torch.float32.itemsize)
    return total


def _part_bytes(folder: Path, variant: str, quantization: Quantization, itemsize: int) -> int:
    """Bytes of a part's weights in a dtype of this size, or as they are quantised: in their files, or while they are
    loaded. Raises ConfigError for a file that cannot be read."""
    files, config = weight_files(folder, usual_variant(folder, variant)), folder / CONFIG
    is_quantized = config.is_file() and stored_method(_read_json(config)) is not None
    matrices = BYTES_PER_WEIGHT[quantization] if folder.name in QUANTIZED else None
    return sum(loaded_bytes(file, itemsize, matrices, is_quantized=is_quantized) for file in files)


def _locate(model: str, variant: str) -> Path:
    path = expanded(model)
    try:
        if path.is_dir():
            if not _is_checkpoint(path):
                raise ConfigError(why_not_folder(path, INDEX))
            return path
        if path.is_file():
            raise ConfigError(why_not_file(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ConfigError(f"no model directory {path}")
    path = download(model, variant)
    if not _is_checkpoint(path):
        raise ConfigError(f"{model} has no {INDEX}: single files and GGUF are not read; {INSTEAD}")
    return path


def _is_checkpoint(path: Path) -> bool:
    return (path / INDEX).is_file() or one_part_class(path) is not None


def _read_index(path: Path) -> dict[str, Any]:
    """A checkpoint's model_index.json; for one of one part, what it would say."""
    if (name := one_part_class(path)) is not None:
        part, library = (CONTROLNET_PART, "diffusers") if name in CONTROLNETS else (ONE_PART, "transformers")
        return {"_class_name": name, part: [library, name]}
    index = _read_json(path / INDEX)
    if "_class_name" not in index:
        raise ConfigError(f"{path / INDEX} names no _class_name; is this a diffusers checkpoint?")
    return index


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"cannot read {path}: it holds no JSON object")
    return content


def _read_defaults(path: Path) -> Defaults:
    file = path / DEFAULTS
    if not file.is_file() or one_part_class(path) is not None:  # there it would be a language model's
        return Defaults()
    try:
        return msgspec.convert(_read_json(file), Defaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}") from error


def first_line(error: BaseException) -> str:
    """The first line of a library's error message, with the second where the first ends in a colon."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    line, *others = str(error).strip().splitlines() or [type(error).__name__]
    return f"{line} {others[0].strip()}" if line.endswith(":") and others else line
