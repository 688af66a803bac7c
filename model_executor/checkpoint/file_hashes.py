"""FileHashes: sha256 of weight files, cached by path, size and modification time.

Hashing takes half a second per gigabyte. The Hugging Face hub's cache names its files by their hash, which is then
used.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path

import msgspec

from core.ipc.atomic_file import write_atomically
from core.ipc.small_files import read_small

_BLOB = re.compile(r"[0-9a-f]{64}")


class KnownHash(msgspec.Struct, frozen=True):
    """A file's hash, valid while size and modification time are these."""

    size: int  # bytes
    mtime_ns: int
    sha256: str  # hex


class FileHashes:
    """A cache of weight files' hashes by real path, kept in one file of this folder between starts. A damaged one is
    made again.
    """

    def __init__(self, cache_folder: Path) -> None:
        self._file = cache_folder / "fingerprints.json"
        self._known: dict[str, KnownHash] = {}
        self._is_changed = False
        with suppress(OSError, ValueError, msgspec.DecodeError, RecursionError):
            self._known = msgspec.json.decode(read_small(self._file), type=dict[str, KnownHash])

    def sha256(self, path: Path) -> str:
        """Hex sha256 of a file's content. Raises OSError for one that cannot be read."""
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
