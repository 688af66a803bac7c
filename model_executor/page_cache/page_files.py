"""Cache entries as files: one directory, shared by every process that names it, under one byte budget.

    <template>-<entry>.page    magic | nbytes | block bytes | key length | key | crc32 per block | crc32 of all before,
                               and then the entry's bytes
    <the same>.<random>.tmp    being written; its writer holds a lock on it, so that a dead writer's is recognised
    lock                       held while files are counted, added and removed

<template> and <entry> are the first 128 bits of the SHA-256 of the template's key and of the entry's: names that are
safe for any keys, with a common prefix for all files of a template.

A reader knows key and sizes, and with them the whole header except the checksums: a file that differs is not the one it
wants. Nothing is synced to the disk: a file that is torn by a power cut is recognised by its checksums.

Where the file system has less room than the budget, entries make room for each other within what there is. A disk that
cannot be written is left alone for RETRY_SECONDS; then the next entry tries again. Reading goes on meanwhile.

zlib.crc32 reads 6.9 GB/s on one Zen 5 core; blake2b 1.4, sha256 2.0, adler32 4.1. Sums of 64-bit words reach 31
(memcpy: 45) but do not detect swapped words. Computed on pieces that are still in the processor's cache.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from core.page_scheme import unpatched

logger = logging.getLogger("stencil.worker")

Bytes = npt.NDArray[np.uint8]

MAGIC = b"STNLPG01"
"""Format and version."""

PIECE_BYTES = 256 * 1024
"""Bytes read or written at a time: small enough that the checksum finds them in the second-level cache."""

RETRY_SECONDS = 5.0
"""Pause after a failed write. An entry can be a gigabyte, and a full disk may accept most of it before it fails."""

_FIXED = struct.Struct("<8sQQI")
_CHECKSUM = np.dtype("<u4")
_OURS = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.(page|[0-9a-f]{16}\.tmp)")


class DamagedFileError(Exception):
    """A file that is not the complete entry it is named after. Not raised out of this module."""


class NoRoomError(Exception):
    """An entry that does not fit the budget even if everything is evicted. Not raised out of this module."""


class DeletedError(Exception):
    """An entry whose template was deleted while it was written. Not raised out of this module."""


class PageFiles:
    """The disk tier: a directory of entries under one byte budget. Any process may call any method at any time; none
    raises because of what it finds on the disk. Files with other names are neither counted nor touched.
    """

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        """The directory is created, with mode 0700, when the first entry is written. An existing one is now closed to
        other users, and reduced to the budget."""
        self.directory = directory
        self.budget_bytes = budget_bytes
        self._retry_at: float | None = None  # monotonic; None: the last write did not fail
        _close_to_others(directory)
        with suppress(OSError, NoRoomError), self._locked():
            self._make_room(0)

    def read(
        self, key: str, out: Bytes, block_bytes: int, on_block: Callable[[int], None], order: Iterable[int] = ()
    ) -> bool:
        """Fill `out`, uint8 [nbytes], block by block; `on_block` is called with each one that is read and checked.

        order: all blocks; each is requested when the previous one has been read; () for ascending. Returns False if
        the file is missing or damaged; a damaged file is removed, and blocks already passed to `on_block` are valid all
        the same. Marks the entry as used, for eviction.
        """
        path = self._path(key)
        try:
            with _opened(path) as fd:
                _read_entry(fd, key, out, block_bytes, on_block, order)
                with suppress(OSError):  # another user's file that we may read but not touch
                    os.utime(fd, ns=_now())
        except FileNotFoundError:
            return False
        except (OSError, DamagedFileError) as error:
            if not _is_out_of_means(error):
                _remove(path)
            return False
        return True

    def write(self, key: str, data: Bytes, block_bytes: int) -> bool:
        """Write an entry, uint8 [nbytes]; evicts the least recently used ones. An existing entry is not written again.

        Returns False, and leaves no file, where the budget or the disk has no room, the directory cannot be written, or
        the entry's template is deleted meanwhile.
        After a disk error no write is tried for RETRY_SECONDS.
        """
        if self._retry_at is not None and time.monotonic() < self._retry_at:
            return False
        try:
            self._write(key, data, block_bytes)
        except (NoRoomError, DeletedError, IsADirectoryError):  # concerns this entry alone: others may still be written
            return False
        except OSError as error:
            self._note_fault(error)
            return False
        self._note_success()
        return True

    def _write(self, key: str, data: Bytes, block_bytes: int) -> None:
        """Raises OSError, NoRoomError and DeletedError."""
        path, nbytes = self._path(key), _header_bytes(key, len(data), block_bytes) + len(data)
        if _touch(path, nbytes):
            return
        with self._temporary(path, nbytes) as (name, fd):
            _write_entry(fd, key, data, block_bytes)
            os.utime(fd, ns=_now())
            with self._locked():
                try:
                    name.replace(path)
                except FileNotFoundError as error:
                    raise DeletedError from error

    def _note_fault(self, error: OSError) -> None:
        if self._retry_at is None:
            logger.warning(
                "no pages are written to %s until that is possible again (tried every %g s): %s",
                self.directory,
                RETRY_SECONDS,
                error.strerror,
            )
        self._retry_at = time.monotonic() + RETRY_SECONDS

    def _note_success(self) -> None:
        if self._retry_at is not None:
            logger.warning("pages are written to %s again", self.directory)
        self._retry_at = None

    def delete(self, key: str) -> None:
        """Remove an entry's file, where there is one."""
        _remove(self._path(key))

    def delete_template(self, template_key: str) -> None:
        """Remove the files of all entries of a template with all patch sets, of any process, and those being written.
        template_key: the one without patches."""
        prefix = f"{_digest(template_key)}-"
        with suppress(OSError):
            for file in self._files():
                if file.path.name.startswith(prefix):
                    _remove(file.path)

    def _path(self, key: str) -> Path:
        return self.directory / f"{_digest(unpatched(key))}-{_digest(key)}.page"

    @contextmanager
    def _temporary(self, path: Path, nbytes: int) -> Iterator[tuple[Path, int]]:
        """A temporary file of `nbytes` to write, which counts towards the budget and is removed at the end unless it
        was renamed. Raises as `_make_room`."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        with ExitStack() as cleanup:
            with self._locked():
                self._make_room(nbytes)
                fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                cleanup.callback(os.close, fd)
                cleanup.callback(_remove, name)
                # Before the directory is unlocked, so that no process sees the file without a writer or its size.
                fcntl.flock(fd, fcntl.LOCK_EX)
                os.ftruncate(fd, nbytes)
            yield name, fd

    def _make_room(self, nbytes: int) -> None:
        """Evict until `nbytes` more fit the budget and the disk. Where that is impossible, evicts nothing and raises
        NoRoomError for the budget, OSError for the disk. The directory must be locked.

        Temporary files of dead writers are removed first; those of living ones stay.
        """
        files = list(self._files())
        writing = [
            file for file in files if file.is_temporary and not (_is_abandoned(file.path) and _remove(file.path))
        ]
        pages = [file for file in files if not file.is_temporary]
        used = sum(file.nbytes for file in pages)
        room = self.budget_bytes - nbytes - sum(file.nbytes for file in writing)
        if room < 0:
            raise NoRoomError
        room = min(room, _free_bytes(self.directory) + used - nbytes)
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))
        excess = used - room
        for file in sorted(pages, key=lambda file: file.last_use):
            if excess > 0 and _remove(file.path):
                excess -= file.nbytes
        if excess > 0:
            raise OSError(errno.EPERM, "files that cannot be removed", str(self.directory))

    def _files(self) -> Iterator[_File]:
        """All entries, also those being written. Scanning takes 2 us per file, on a thread that is about to write
        megabytes; an index would have to survive crashes of every process that shares it."""
        try:
            with os.scandir(self.directory) as found:
                for entry in found:
                    if _OURS.fullmatch(entry.name):
                        with suppress(FileNotFoundError):
                            yield _File.of(Path(entry.path), entry.stat(follow_symlinks=False))
        except FileNotFoundError:
            return

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks the directory for this process. The lock ends with the descriptor, so also with the process."""
        fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    nbytes: int
    last_use: int  # ns since the epoch
    is_temporary: bool

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> _File:
        # A directory of this name is not an entry: it is not counted, and never removed.
        nbytes = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
        return cls(path, nbytes, status.st_mtime_ns, path.suffix == ".tmp")


def _close_to_others(directory: Path) -> None:
    """Remove all rights of group and others, if the directory exists and belongs to this user. One with the sticky bit
    (such as /tmp) is meant for all users and stays as it is."""
    with suppress(OSError):  # it does not exist
        status = directory.stat()
        if not status.st_mode & 0o077:
            return
        try:
            if status.st_uid != os.geteuid() or status.st_mode & stat.S_ISVTX:
                raise PermissionError(errno.EPERM, "not this user's alone", str(directory))
            directory.chmod(status.st_mode & 0o700)
        except OSError as error:
            logger.warning("others may look into the cache directory %s: %s", directory, error.strerror)


def _free_bytes(directory: Path) -> int:
    """Bytes that the file system has free for this user."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


# ------------------------------------------------------------------------------------------------------ one file


def _read_entry(
    fd: int, key: str, out: Bytes, block_bytes: int, on_block: Callable[[int], None], order: Iterable[int]
) -> None:
    header_bytes = _header_bytes(key, len(out), block_bytes)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != header_bytes + len(out):
        raise DamagedFileError
    checksums = _checksums(os.pread(fd, header_bytes, 0), _prefix(key, len(out), block_bytes))
    for index in order or range(len(checksums)):
        start = index * block_bytes
        block = out[start : start + block_bytes]
        if _read_block(fd, block, header_bytes + start) != checksums[index]:
            raise DamagedFileError
        on_block(index)


def _write_entry(fd: int, key: str, data: Bytes, block_bytes: int) -> None:
    offset = _header_bytes(key, len(data), block_bytes)
    starts = range(0, len(data), block_bytes)
    checksums = [_write_block(fd, data[start : start + block_bytes], offset + start) for start in starts]
    header = _prefix(key, len(data), block_bytes) + np.array(checksums, _CHECKSUM).tobytes()
    _write_all(fd, memoryview(header + zlib.crc32(header).to_bytes(4, "little")), 0)


def _prefix(key: str, nbytes: int, block_bytes: int) -> bytes:
    """The start of the header, which is the same in every file of this entry."""
    name = key.encode()
    return _FIXED.pack(MAGIC, nbytes, block_bytes, len(name)) + name


def _header_bytes(key: str, nbytes: int, block_bytes: int) -> int:
    num_blocks = -(-nbytes // block_bytes)
    return _FIXED.size + len(key.encode()) + (num_blocks + 1) * _CHECKSUM.itemsize


def _checksums(header: bytes, prefix: bytes) -> list[int]:
    """The blocks' checksums. Raises DamagedFileError unless the header is intact and starts with `prefix`."""
    body, own = header[:-4], header[-4:]
    if not body.startswith(prefix) or zlib.crc32(body) != int.from_bytes(own, "little"):
        raise DamagedFileError
    return np.frombuffer(body, _CHECKSUM, offset=len(prefix)).tolist()  # type: ignore[no-any-return]


def _read_block(fd: int, block: Bytes, offset: int) -> int:
    """Fill `block` from the file at `offset`; returns the checksum of its bytes."""
    checksum = 0
    for start in range(0, len(block), PIECE_BYTES):
        piece = block[start : start + PIECE_BYTES].data
        if os.preadv(fd, [piece], offset + start) != len(piece):
            raise DamagedFileError
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _write_block(fd: int, block: Bytes, offset: int) -> int:
    checksum = 0
    for start in range(0, len(block), PIECE_BYTES):
        piece = block[start : start + PIECE_BYTES].data
        checksum = zlib.crc32(piece, checksum)
        _write_all(fd, piece, offset + start)
    return checksum


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)  # short when the disk is nearly full; the next call then raises
        data, offset = data[written:], offset + written


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor to read. Does not follow links, and does not block on a pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def _touch(path: Path, nbytes: int) -> bool:
    """Mark a file as just used. Returns False if there is none of this size."""
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
            return False
        os.utime(path, ns=_now(), follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _is_abandoned(path: Path) -> bool:
    """Whether a temporary file's writer has died: a living one holds a lock on it."""
    try:
        with _opened(path) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return not _is_out_of_means(error)  # else it is not a file that a writer makes
    return True


def _is_out_of_means(error: Exception) -> bool:
    """Whether this process, or the machine, may open or lock no more files now: that says nothing of a file."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOLCK)


def _remove(path: Path) -> bool:
    """Unlink a file. Returns False if that is not possible: it is a directory, or its folder cannot be written."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _now() -> tuple[int, int]:
    # Explicit, because the kernel's own time stamps have a resolution of 4 ms.
    return time.time_ns(), time.time_ns()
