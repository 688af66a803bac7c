"""Explains what to give instead of weights in formats that are not read: GGUF, 8-bit floats, one file for all parts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from core.errors import ConfigError
from model_executor.checkpoint.file_parameters import StoredTensor, stored_tensors
from model_executor.checkpoint.quantization import INSTEAD, QUANTIZED

LAYOUT = "--model takes a diffusers directory or a hub id"

SCALES = (".scale_weight", ".weight_scale", ".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
"""How the names of tensors end that ComfyUI's files have beside quantised weights. diffusers ignores them, and the
pictures are noise."""


def check_format(folder: Path, files: Iterable[Path]) -> None:
    """Raises ConfigError for a part in a format that is not read. files: its weights that would be loaded; damaged
    ones are reported when they are loaded."""
    known = [*files]
    if not known and (found := sorted(folder.glob("*.gguf"))):
        raise ConfigError(_gguf(found[0]))
    for file in known:
        if why := _foreign(_readable(file), may_be_fp8=folder.name not in QUANTIZED):
            raise ConfigError(f"{file} {why}; {INSTEAD}")


def why_not_file(file: Path) -> str:
    """Why --model cannot be this file."""
    if file.suffix == ".gguf":
        return _gguf(file)
    if file.suffix != ".safetensors":
        return f"{file} is a file; {LAYOUT}"
    why = _foreign(stored_tensors(file), may_be_fp8=False)
    if why:
        return f"{file} {why}; {INSTEAD}"
    convert = "convert it with diffusers' from_single_file(...) and save_pretrained(FOLDER)"
    return f"{file} is a single file; {LAYOUT}: {convert}, or give the repository of this layout"


def why_not_folder(folder: Path, index: str) -> str:
    """Why --model cannot be this folder, which lacks the index."""
    found = sorted(folder.glob("*.gguf"))
    return _gguf(found[0]) if found else f"{folder} has no {index}; {LAYOUT}"


def _gguf(file: Path) -> str:
    return f"{file} is GGUF, which is not read; {INSTEAD}"


def _readable(file: Path) -> list[StoredTensor]:
    with suppress(ConfigError):
        return stored_tensors(file)
    return []


def _foreign(tensors: Iterable[StoredTensor], *, may_be_fp8: bool) -> str:
    """What these tensors have that is not read; "": nothing."""
    for tensor in tensors:
        if tensor.name.endswith(SCALES):
            return f"holds quantised weights and their scales ({tensor.name}), which are not read"
        if tensor.dtype.startswith("F8") and not may_be_fp8:
            return f"holds 8-bit floats ({tensor.name} is {tensor.dtype}), which are not read"
    return ""
