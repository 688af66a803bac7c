"""Fingerprint of a checkpoint: a hash over all that its keys and values depend on, the input aside.

Hashing weights takes half a second per gigabyte, so their hashes are remembered by path, size and time of change. The
Hugging Face hub's cache names its files by their hash, which is taken from there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from core.ipc.atomic_file import write_atomically
from model_executor.checkpoint.hub import INDEX
from model_executor.checkpoint.loader import Checkpoint
from model_executor.checkpoint.weights import usual_variant, variant_of

_PATTERNS = ("*/*.json", "*/*.txt", "*/*.model", "*/*.safetensors")
"""All that a part is loaded from."""

_BLOB = re.compile(r"[0-9a-f]{64}")


class KnownHash(msgspec.Struct, frozen=True):
    """sha256 of a file as it was at `mtime_ns`, in hex."""

    size: int
    mtime_ns: int
    sha256: str


def fingerprint(checkpoint: Checkpoint, cache_folder: Path) -> str:
    """Hex digest of the checkpoint's weights, configurations and tokenizers, of which parts its index names, of the
    dtype it computes in, and of how its weights are quantised.

    The same files elsewhere have the same fingerprint. Raises OSError for a file that cannot be read; whatever is wrong
    with the remembered hashes only means that they are made again.
    """
    hashes = _KnownHashes(cache_folder / "fingerprints.json")
    parts = [(str(path.relative_to(checkpoint.path)), hashes.sha256(path)) for path in _files(checkpoint)]
    parts.append((INDEX, _named_parts(checkpoint)))
    hashes.save()
    computed = [str(checkpoint.dtype), *([checkpoint.quantization] if checkpoint.quantization != "none" else [])]
    return hashlib.sha256(repr([*computed, parts]).encode()).hexdigest()


def _named_parts(checkpoint: Checkpoint) -> str:
    """Hex sha256 of the parts in the index: one that it leaves out is not used, though its files are there."""
    named = {part: value for part, value in checkpoint.index.items() if isinstance(value, list)}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _files(checkpoint: Checkpoint) -> Iterator[Path]:
    """In order; of weights the variant that is loaded."""
    for path in sorted(path for pattern in _PATTERNS for path in checkpoint.path.glob(pattern)):
        if path.suffix != ".safetensors" or variant_of(path) == usual_variant(path.parent, checkpoint.variant):
            yield path


class _KnownHashes:
    """Hashes of weight files by real path, kept in one file between starts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, KnownHash] = {}
        self._is_changed = False
        with suppress(OSError, msgspec.DecodeError):
            self._known = msgspec.json.decode(file.read_bytes(), type=dict[str, KnownHash])

    def sha256(self, path: Path) -> str:
        """Hex sha256 of a file's content."""
        real = path.resolve()
        if path.is_symlink() and _BLOB.fullmatch(real.name):
            return real.name
        if path.suffix != ".safetensors":
            return _sha256(real)
        status = real.stat()
        known = self._known.get(str(real))
        if known is None or (known.size, known.mtime_ns) != (status.st_size, status.st_mtime_ns):
            known = KnownHash(status.st_size, status.st_mtime_ns, _sha256(real))
            self._known[str(real)] = known
            self._is_changed = True
        return known.sha256

    def save(self) -> None:
        """Keep what is new, without files that are gone. Another process may write at the same time: what the loser
        knew is hashed again one day."""
        if self._is_changed:
            known = {path: entry for path, entry in self._known.items() if Path(path).exists()}
            with suppress(OSError):  # a folder that cannot be written costs the next start a hash, no more
                write_atomically(self._file, msgspec.json.encode(known))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
