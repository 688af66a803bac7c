"""Compiles a C file into a shared library, and keeps it in the user's cache folder for later processes.

    kernels/
        <key>-<sha256>.so   a library. key: of source, compiler, flags and CPU; sha256: of the file itself
        building/           of the process that compiles; what a dead one has left goes with the next compilation
        lock                held by the process that compiles, and released by the kernel if that dies

A library gets its name when it is complete, so that a process finds either none or a whole one. Its code is run, so
the folder is used only if nobody else can write it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from core.ipc.small_files import open_regular

COMPILE_SECONDS = 300.0
"""For the compiler, and for another process that compiles. With twenty processes at work on two cores it took 76."""

LOCK_POLL_SECONDS = 0.05

MAX_KEPT = 8
"""Libraries that are kept, those used last: sources and compilers change, and a home may be shared by machines."""

_WITH_ITS_PARENT = """
exec 3<&0
"$@" 3<&- &
child=$!
(read -r line <&3; kill -9 0) &
watcher=$!
wait "$child"
status=$?
if [ "$status" -lt 128 ]; then kill -9 "$watcher"; wait "$watcher"; fi 2>/dev/null
exit "$status"
"""
"""Runs a compiler and all that it starts in a process group that ends with the pipe on stdin, and so with the parent,
however that dies. The kernel's own signal for a parent's death does not reach a compiler's children. The watcher of the
pipe is waited for, because not every container's first process collects orphans; after a compiler that a signal has
ended it stays, to end the compiler's children with the pipe."""


class Library(NamedTuple):
    path: Path
    digest: str  # hex sha256 of its content


class CompileError(Exception):
    """The compiler has failed; the message is what it said."""


@contextmanager
def compiled_library(source: Path, compiler: str, flags: Sequence[str], cpu: str, folder: Path) -> Iterator[Library]:
    """A library of a C file, there at least while the context is open. compiler: path of a program. cpu: what it
    compiles for. folder: where it is kept; if that cannot be written or is full, does not allow programs, is open to
    other users, or stays locked, the library is compiled in a temporary folder, for this process alone. Raises OSError,
    CompileError.
    """
    key = _key(source, compiler, flags, cpu)
    try:
        library = _kept(folder, key, [compiler, *flags, str(source)])
    except (OSError, CompileError):  # CompileError: a full disk is an error of the compiler
        with tempfile.TemporaryDirectory(prefix="stencil-kernels-") as building:
            yield _compiled([compiler, *flags, str(source)], Path(building))
        return
    yield library


def _kept(folder: Path, key: str, command: Sequence[str]) -> Library:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_folder(folder)
    if (found := _find(folder, key)) is not None:
        return found
    with _locked(folder):
        if (found := _find(folder, key)) is not None:  # another process has compiled it meanwhile
            return found
        building = folder / "building"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            made = _compiled(command, building)
            library = Library(made.path.replace(folder / f"{key}-{made.digest}.so"), made.digest)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        _remove_old(folder)
        return library


def _check_folder(folder: Path) -> None:
    """Raises OSError unless libraries may be loaded from the folder, and only this user can put some there."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status, flags = os.fstat(fd), os.fstatvfs(fd).f_flag
    finally:
        os.close(fd)
    if flags & os.ST_NOEXEC:
        raise PermissionError(f"{folder} is on a file system that allows no programs")
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError(f"{folder} is of another user, or others can write it")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises TimeoutError, an OSError, if another process holds the lock for longer than a compilation may take."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + COMPILE_SECONDS
        while not _try_lock(fd):
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process holds {folder / 'lock'}")
            time.sleep(LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _find(folder: Path, key: str) -> Library | None:
    """The library, if there is one of this user that is not damaged."""
    for path in folder.glob(f"{key}-*.so"):
        with suppress(OSError, ValueError), open_regular(path) as file:
            digest = hashlib.sha256(file.read()).hexdigest()
            if path.name == f"{key}-{digest}.so" and os.fstat(file.fileno()).st_uid == os.geteuid():
                os.utime(file.fileno())  # for `_remove_old`
                return Library(path, digest)
    return None


def _remove_old(folder: Path) -> None:
    """Remove the libraries that have not been used for longest. Processes that have loaded one keep it."""
    with suppress(OSError):  # another process may remove one, too
        paths = sorted(folder.glob("*.so"), key=lambda path: path.lstat().st_mtime_ns)
        for path in paths[:-MAX_KEPT]:
            path.unlink()


def _compiled(command: Sequence[str], building: Path) -> Library:
    """building: an empty folder, which is also the compiler's for temporary files."""
    path, errors = building / "kernels.so", building / "errors"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            ["sh", "-c", _WITH_ITS_PARENT, "sh", *command, "-o", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=os.environ | {"TMPDIR": str(building)},
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        status = process.wait(COMPILE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{command[0]} took more than {COMPILE_SECONDS:g} s") from error
    finally:
        process.stdin.close()  # ends the group, in whatever state that is
        process.wait()
    if status:
        raise CompileError(f"{command[0]} failed with status {status}: {errors.read_text(errors='replace').strip()}")
    return Library(path, _sha256(path))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _key(source: Path, compiler: str, flags: Sequence[str], cpu: str) -> str:
    """Of all that a library depends on: a home directory may be shared by machines with other CPUs and compilers."""
    binary = Path(compiler).resolve()
    status = binary.stat()
    parts = [str(binary), status.st_size, status.st_mtime_ns, *flags, cpu]
    return hashlib.sha256(_text(source) + repr(parts).encode()).hexdigest()[:32]


def _text(source: Path) -> bytes:
    """The file, and all files that it includes from its own folder."""
    text = source.read_bytes()
    included = (source.parent / name.decode() for name in re.findall(rb'^#include "(.+)"', text, re.MULTILINE))
    return text + b"".join(map(_text, included))
