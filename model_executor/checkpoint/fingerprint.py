"""Computes the fingerprint of a checkpoint: a hash over everything but the input that its cached pages depend on.

Hashing weights takes half a second per gigabyte, so hashes of files are cached by path, size and modification time. The
Hugging Face hub's cache names its files by their hash, which is then used.
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
"""All files that parts are loaded from."""

_BLOB = re.compile(r"[0-9a-f]{64}")


class KnownHash(msgspec.Struct, frozen=True):
    """A file's hash, valid while size and modification time are these."""

    size: int  # bytes
    mtime_ns: int
    sha256: str  # hex


def fingerprint(checkpoint: Checkpoint, cache_folder: Path) -> str:
    """Hex digest of the checkpoint's weights, configurations and tokenizers, the parts in its index, the compute dtype
    and the quantisation.

    Does not depend on where the files are. Raises OSError for a file that cannot be read; a damaged cache of hashes is
    computed again.
    """
    hashes = _KnownHashes(cache_folder / "fingerprints.json")
    parts = [(str(path.relative_to(checkpoint.path)), hashes.sha256(path)) for path in _files(checkpoint)]
    parts.append((INDEX, _named_parts(checkpoint)))
    hashes.save()
    computed = [str(checkpoint.dtype), *([checkpoint.quantization] if checkpoint.quantization != "none" else [])]
    return hashlib.sha256(repr([*computed, parts]).encode()).hexdigest()


def _named_parts(checkpoint: Checkpoint) -> str:
    """Hex sha256 of the parts in the index: a part that it omits is not used, even if its files exist."""
    named = {part: value for part, value in checkpoint.index.items() if isinstance(value, list)}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _files(checkpoint: Checkpoint) -> Iterator[Path]:
    """The files to hash, in order; weights only of the variant that is loaded."""
    for path in sorted(path for pattern in _PATTERNS for path in checkpoint.path.glob(pattern)):
        if path.suffix != ".safetensors" or variant_of(path) == usual_variant(path.parent, checkpoint.variant):
            yield path


class _KnownHashes:
    """A cache of weight files' hashes by real path, kept in one file between starts."""

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
        """Write the cache if it changed, without files that no longer exist. If several processes write, the last one
        wins; the others' hashes are computed again when needed."""
        if self._is_changed:
            known = {path: entry for path, entry in self._known.items() if Path(path).exists()}
            with suppress(OSError):  # if the folder cannot be written, the next start hashes again
                write_atomically(self._file, msgspec.json.encode(known))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
