"""Compiling a library: once for all processes, and nothing is left of a process that dies meanwhile."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from model_executor.kernels import compiled_library as module
from model_executor.kernels.compiled_library import CompileError, compiled_library

ROOT = Path(__file__).parents[3]
CC = shutil.which("cc") or ""
FLAGS = ("-shared", "-fPIC")
SLOW = '#!/bin/sh\necho x >> "{count}"\nmktemp > /dev/null\nsleep {seconds} 2> /dev/null\nexec cc "$@"\n'
USE = """
import sys
from pathlib import Path
from model_executor.kernels.compiled_library import compiled_library
with compiled_library(Path(sys.argv[1]), sys.argv[2], ("-shared", "-fPIC"), "this one", Path(sys.argv[3])) as library:
    print(library.digest)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }")
    return path


@pytest.fixture
def slow(tmp_path: Path) -> Callable[[float], Path]:
    """A compiler that takes some seconds, leaves a temporary file behind and counts its calls in `count`."""

    def make(seconds: float) -> Path:
        path = tmp_path / "slow-cc"
        path.write_text(SLOW.format(count=tmp_path / "count", seconds=seconds))
        path.chmod(0o755)
        return path

    return make


def answer(
    source: Path, folder: Path, compiler: str = CC, flags: tuple[str, ...] = FLAGS, cpu: str = "this one"
) -> int:
    with compiled_library(source, compiler, flags, cpu, folder) as library:
        return int(ctypes.CDLL(str(library.path)).answer())


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def processes_with(word: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if word in " ".join(each.info["cmdline"] or ())]


def test_it_is_compiled_once_for_what_it_depends_on(
    source: Path, tmp_path: Path, slow: Callable[[float], Path]
) -> None:
    folder, compiler = tmp_path / "kernels", str(slow(0))
    for _ in range(2):
        assert answer(source, folder, compiler) == 42
    assert (tmp_path / "count").read_text() == "x\n"
    answer(source, folder, compiler, (*FLAGS, "-O1"))
    answer(source, folder, compiler, cpu="another")
    source.write_text("int answer(void) { return 43; }")
    assert answer(source, folder, compiler) == 43
    assert (tmp_path / "count").read_text() == "x\n" * 4
    assert len(kept(folder)) == 4
    assert all(name.endswith(".so") for name in kept(folder))


def test_it_is_compiled_again_when_a_file_that_it_includes_changes(source: Path, tmp_path: Path) -> None:
    folder, part = tmp_path / "kernels", tmp_path / "part.c"
    source.write_text('#include <stdint.h>\n#include "part.c"\n')
    for number in (44, 45):
        part.write_text(f"int answer(void) {{ return {number}; }}")
        assert answer(source, folder) == number


@pytest.mark.parametrize("damage", [b"", b"nothing"])
def test_a_damaged_one_is_compiled_again(source: Path, tmp_path: Path, damage: bytes) -> None:
    folder = tmp_path / "kernels"
    answer(source, folder)
    (name,) = kept(folder)
    (folder / name).unlink()
    (folder / name).write_bytes(damage)
    assert answer(source, folder) == 42
    assert len(kept(folder)) == 1


def test_a_folder_that_cannot_be_written_is_done_without(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = os.listdir(os.environ.get("TMPDIR", "/tmp"))
    assert answer(source, tmp_path / "file" / "kernels") == 42
    assert not [
        name for name in os.listdir(os.environ.get("TMPDIR", "/tmp")) if name not in before and "kernels" in name
    ]


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_can_write_is_not_used(source: Path, tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(mode)
    assert answer(source, folder) == 42
    assert list(folder.iterdir()) == []


def test_a_folder_where_programs_may_not_be_run_is_not_used(source: Path, tmp_path: Path) -> None:
    folder = next((path for path in map(Path, ("/dev", "/proc", "/sys")) if is_noexec(path)), None)
    if folder is None:
        pytest.skip("no file system is mounted without programs")
    with pytest.raises(PermissionError, match="allows no programs"):
        module._check_folder(folder)


def is_noexec(folder: Path) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)


def test_a_lock_that_is_a_link_harms_no_file(source: Path, tmp_path: Path) -> None:
    folder, other = tmp_path / "kernels", tmp_path / "other"
    folder.mkdir(mode=0o700)
    other.write_text("kept")
    (folder / "lock").symlink_to(other)
    assert answer(source, folder) == 42
    assert other.read_text() == "kept"
    assert kept(folder) == []


def test_a_pipe_in_place_of_a_library_is_not_waited_for(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    answer(source, folder)
    (name,) = kept(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert answer(source, folder) == 42
    assert (folder / name).is_file()


def test_a_lock_that_is_not_released_is_given_up(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(module, "COMPILE_SECONDS", 1.0)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert answer(source, folder) == 42
    assert kept(folder) == []


def test_a_compiler_that_fails_in_the_folder_is_tried_in_a_temporary_one(source: Path, tmp_path: Path) -> None:
    """As where the folder's disk is full."""
    folder, compiler = tmp_path / "kernels", tmp_path / "full-cc"
    compiler.write_text(f'#!/bin/sh\ncase "$TMPDIR" in {folder}/*) exit 1;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    assert answer(source, folder, str(compiler)) == 42
    assert kept(folder) == []


def test_libraries_that_have_not_been_used_for_long_are_removed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels"
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    answer(source, folder, cpu="first")
    (first,) = kept(folder)
    answer(source, folder, cpu="second")
    answer(source, folder, cpu="first")
    answer(source, folder, cpu="third")
    assert len(kept(folder)) == 2
    assert first in kept(folder)


def test_no_process_is_left_for_others_to_collect(source: Path, tmp_path: Path) -> None:
    """Here the compiling process stands in for the first one of a container: orphans come to it."""
    adopt = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"  # PR_SET_CHILD_SUBREAPER
    left = "\nimport time, psutil; time.sleep(0.3); print(len(psutil.Process().children()))"
    command = [sys.executable, "-c", adopt + USE + left, str(source), CC, str(tmp_path / "kernels")]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.split()[-1] == "0"


def test_what_the_compiler_says_is_the_error(source: Path, tmp_path: Path) -> None:
    source.write_text("int answer(void) { return nothing; }")
    with pytest.raises(CompileError, match=r"nothing.* undeclared"):
        answer(source, tmp_path / "kernels")
    assert kept(tmp_path / "kernels") == []


def start(source: Path, compiler: Path, folder: Path, scratch: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", USE, str(source), str(compiler), str(folder)]
    environment = os.environ | {"TMPDIR": str(scratch)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_of_several_processes_one_compiles(source: Path, tmp_path: Path, slow: Callable[[float], Path]) -> None:
    children = [start(source, slow(0.5), tmp_path / "kernels", tmp_path) for _ in range(2)]
    digests = {child.communicate(timeout=60)[0] for child in children}
    assert len(digests) == 1
    assert (tmp_path / "count").read_text() == "x\n"


@pytest.mark.parametrize("number", [9, 15])
def test_nothing_is_left_of_a_process_that_dies_while_it_compiles(
    source: Path, tmp_path: Path, slow: Callable[[float], Path], number: int
) -> None:
    """Neither files in the temporary directory nor compilers; and the next process is not kept waiting."""
    scratch, folder = tmp_path / "scratch", tmp_path / "kernels"
    scratch.mkdir()
    child = start(source, slow(30), folder, scratch)
    deadline = time.monotonic() + 30
    while not processes_with(str(tmp_path / "slow-cc")) or not (tmp_path / "count").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(number)
    child.communicate(timeout=10)
    deadline = time.monotonic() + 5
    while processes_with(str(tmp_path)):
        assert time.monotonic() < deadline, "compilers are left"
        time.sleep(0.02)
    assert list(scratch.iterdir()) == []
    assert answer(source, folder) == 42
    assert len(kept(folder)) == 1
