"""AdapterFile: finds the file of an adapter and checks it before any of it is loaded.

Servers may read adapters that their callers name, so a file is not trusted: it may be no file at all, declare tensors
that do not fit into memory, or have a configuration that is of any type. It may also change at any time, and a process
that has mapped a file dies when that is truncated. Therefore it is opened once, and all is read from a copy in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import safe_open

from core.errors import InvalidRequestError
from core.ipc.small_files import open_regular, read_small
from core.sampler_defaults import LEFT_OPEN, SamplerDefaults
from model_executor.checkpoint.weights import PICKLES

PEFT_PREFIX, PEFT_CONFIG = "base_model.model.", "adapter_config.json"
"""The prefix of tensor names in files of `PeftModel.save_pretrained`, and the file with their scale."""

USUAL_NAMES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
"""The names that diffusers and peft give to adapters, which are preferred in a folder of several files."""

CHUNK_BYTES = 1024**2
MAX_HEADER_BYTES = 16 * 1024**2
MAX_CONFIG_BYTES = 1024**2
MAX_TENSORS = 32_768
"""Ten times what adapters of all layers of the largest models have."""
MAX_KEY_CHARACTERS = 512
FLOAT_BYTES = 4
"""Bytes of a number as it is read: whatever a file stores becomes float32."""

UNSUPPORTED = {
    "dora_scale": "it is a DoRA, which changes the weights themselves",
    "lora_magnitude_vector": "it is a DoRA, which changes the weights themselves",
    "lokr_": "it is a LoKr and no LoRA",
    "hada_": "it is a LoHa and no LoRA",
}
"""Part of a tensor's name -> why files with it are not supported."""


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A file that may be read: its tensors fit into memory, and are of a LoRA as far as their names tell.

    path: that it had when it was opened. content: path of the copy that was checked, which has no other name and ends
    with `open`. digest: hex sha256 of the file and its peft configuration, if there is one beside it. nbytes: that its
    tensors take as float32. config: of peft, if it is one of its files; None: it is not. defaults: the sampler's
    settings in a JSON file of the same name beside it, and in its metadata, of which the first go before.
    """

    path: Path
    content: Path
    digest: str
    names: tuple[str, ...]  # of its tensors
    nbytes: int
    config: Mapping[str, Any] | None
    defaults: SamplerDefaults

    @classmethod
    @contextmanager
    def open(cls, path: Path, max_bytes: int | None = None) -> Iterator[AdapterFile]:
        """Find, check and copy the safetensors file at this path, or the one in this folder. max_bytes: the most that
        its tensors may take as float32; None: any. Raises ValueError, OSError, SafetensorError.
        """
        path = _find(path)
        with open_regular(path) as source, os.fdopen(os.memfd_create("adapter"), "wb") as copy:
            content = Path(f"/proc/self/fd/{copy.fileno()}")
            size = os.fstat(source.fileno()).st_size
            check_bytes(size // 2 - MAX_HEADER_BYTES, max_bytes)  # a stored number has 8 bytes at most
            header = _read_header(source)
            os.ftruncate(copy.fileno(), size)  # takes no memory; safe_open compares the header with the size
            copy.write(header)
            copy.flush()
            names, nbytes, metadata = _declared(content)
            check_bytes(nbytes, max_bytes)
            _check_kind(names)
            digest = hashlib.sha256(header)
            _copy_rest(source, copy, size - len(header), digest)
            config = _read_config(path)
            digest.update(config or b"")
            defaults = _beside(path).over(_defaults("its metadata", {**metadata}, is_text=True))
            yield cls(path, content, digest.hexdigest(), names, nbytes, _peft_config(config, names), defaults)


def _find(path: Path) -> Path:
    if not path.exists():
        raise ValueError("there is no such file")
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = [file for file in files if file.suffix == ".safetensors"]
    usual = [file for file in found if file.name in USUAL_NAMES] or found
    if len(usual) == 1:
        return usual[0]
    if found:
        some = ", ".join([*(file.name for file in found[:4]), *(["..."] if len(found) > 4 else [])])
        raise ValueError(f"it holds {some}; name one of these files")
    if pickles := [file for file in files if file.suffix in PICKLES]:
        raise ValueError(
            f"only safetensors weights are read, as unpickling {pickles[0].name} could run code; convert it where you "
            "trust it"
        )
    raise ValueError("a LoRA is a .safetensors file, or a folder that holds one")


def check_bytes(nbytes: int, max_bytes: int | None) -> None:
    """nbytes: the least that the tensors take as float32."""
    if max_bytes is not None and nbytes > max_bytes:
        raise ValueError(
            f"it takes {nbytes / 1e6:.0f} MB of memory, and {max(0, max_bytes) / 1e6:.0f} MB are left for adapters "
            "loaded while the server runs; unload others, or give the server this one with --lora"
        )


def _read_header(source: BinaryIO) -> bytes:
    """The header and the length before it. Raises ValueError for a header that takes long to read."""
    head = source.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header has more than {MAX_HEADER_BYTES // 1024**2} MiB; it is no safetensors file")
    return head + source.read(length)


def _declared(content: Path) -> tuple[tuple[str, ...], int, Mapping[str, str]]:
    """(names of the tensors, bytes that they take as float32, metadata). Raises ValueError for too many or long
    names."""
    with safe_open(content, "pt") as tensors:
        names = tuple(tensors.keys())
        if len(names) > MAX_TENSORS:
            raise ValueError(f"it holds {len(names)} tensors; at most {MAX_TENSORS} are read")
        nbytes = FLOAT_BYTES * sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
        metadata = tensors.metadata() or {}
    if long := next((name for name in names if len(name) > MAX_KEY_CHARACTERS), None):
        raise ValueError(f"the name of a tensor, {long[:40]}..., has more than {MAX_KEY_CHARACTERS} characters")
    return names, nbytes, metadata


def _copy_rest(source: BinaryIO, copy: BinaryIO, nbytes: int, digest: hashlib._Hash) -> None:
    """Copy and hash the next bytes. Raises ValueError if there are fewer."""
    while nbytes > 0:
        if not (chunk := source.read(min(nbytes, CHUNK_BYTES))):
            raise ValueError("it has been truncated while it was read")
        copy.write(chunk)
        digest.update(chunk)
        nbytes -= len(chunk)
    copy.flush()


def _check_kind(names: tuple[str, ...]) -> None:
    for part, reason in UNSUPPORTED.items():
        if any(part in name for name in names):
            raise ValueError(reason)


def _read_config(file: Path) -> bytes | None:
    """The content of a peft configuration beside the file; None: there is none."""
    config = file.with_name(PEFT_CONFIG)
    return read_small(config, MAX_CONFIG_BYTES) if config.is_file() else None


def _peft_config(config: bytes | None, names: tuple[str, ...]) -> Mapping[str, Any] | None:
    if config is None or not all(name.startswith(PEFT_PREFIX) for name in names):
        return None
    read: Any = json.loads(config.decode("utf-8"))
    if not isinstance(read, dict):
        raise ValueError(f"its {PEFT_CONFIG} is no object")
    return read


def _beside(file: Path) -> SamplerDefaults:
    """The settings in the JSON file of the same name, if there is one. Raises ValueError that names it."""
    beside = file.with_suffix(".json")
    if not beside.is_file():
        return LEFT_OPEN
    try:
        read: Any = json.loads(read_small(beside, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{beside.name} is no JSON: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{beside.name} is no object")
    return _defaults(beside.name, read)


def _defaults(where: str, values: Mapping[str, Any], *, is_text: bool = False) -> SamplerDefaults:
    """The sampler's settings among other values. is_text: they are JSON themselves. Raises ValueError that names the
    place and the key."""
    known = {name: values[name] for name in SamplerDefaults.__struct_fields__ if name in values}
    for name, text in known.items() if is_text else ():
        try:
            known[name] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: {name}: {text[:40]!r} is no number") from error
    try:
        return SamplerDefaults(**known)
    except InvalidRequestError as error:
        raise ValueError(f"{where}: {str(error).removesuffix('.')}") from error
