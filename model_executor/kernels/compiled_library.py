"""Compiles a C file into a shared library, and keeps it in the user's cache folder for later processes.

    kernels/
        <key>-<sha256>.so   a library. key: of source, compiler, flags and CPU; sha256: of the file itself
        building/           of the process that compiles; what a dead one has left goes with the next compilation
        lock                held by the process that compiles, and released by the kernel if that dies

A library gets its name when it is complete, so that a process finds either none or a whole one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

COMPILE_SECONDS = 60.0

_WITH_ITS_PARENT = 'exec 3<&0; "$@" 3<&- & child=$!; (cat <&3 >/dev/null; kill -9 0) & wait "$child"'
"""Runs a compiler and all that it starts in a process group that ends with the pipe on stdin, and so with the parent,
however that dies. The kernel's own signal for a parent's death does not reach a compiler's children."""


class Library(NamedTuple):
    path: Path
    digest: str  # hex sha256 of its content


class CompileError(Exception):
    """The compiler has failed; the message is what it said."""


@contextmanager
def compiled_library(source: Path, compiler: str, flags: Sequence[str], cpu: str, folder: Path) -> Iterator[Library]:
    """A library of a C file, there at least while the context is open. compiler: path of a program. cpu: what it
    compiles for. folder: where it is kept; where that cannot be
    written, it is compiled for this process alone. Raises OSError, CompileError.
    """
    key = _key(source, compiler, flags, cpu)
    try:
        library = _kept(folder, key, [compiler, *flags, str(source)])
    except OSError:
        with tempfile.TemporaryDirectory(prefix="stencil-kernels-") as building:
            yield _compiled([compiler, *flags, str(source)], Path(building))
        return
    yield library


def _kept(folder: Path, key: str, command: Sequence[str]) -> Library:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (found := _find(folder, key)) is not None:
        return found
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (found := _find(folder, key)) is not None:  # another process has compiled it meanwhile
            return found
        building = folder / "building"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            made = _compiled(command, building)
            return Library(made.path.replace(folder / f"{key}-{made.digest}.so"), made.digest)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _find(folder: Path, key: str) -> Library | None:
    """The library, if there is one of this user that is not damaged."""
    for path in folder.glob(f"{key}-*.so"):
        with suppress(OSError):
            digest = _sha256(path)
            if path.name == f"{key}-{digest}.so" and path.stat().st_uid == os.geteuid():
                return Library(path, digest)
    return None


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
    return hashlib.sha256(source.read_bytes() + repr(parts).encode()).hexdigest()[:32]
