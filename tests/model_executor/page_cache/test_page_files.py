"""The disk tier on a real directory: whatever files it finds, it never raises, exceeds the budget or returns wrong
bytes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest
from disks import fill, mounted_tmpfs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_executor.page_cache import page_files
from model_executor.page_cache.page_files import PageFiles

NBYTES, BLOCK = 10_000, 4096
KEY = "template-0x1.0p+0"

Bytes = npt.NDArray[np.uint8]


def random_bytes(seed: int = 0, nbytes: int = NBYTES) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def read(files: PageFiles, key: str = KEY, nbytes: int = NBYTES, block: int = BLOCK) -> tuple[bool, Bytes, list[int]]:
    out, blocks = np.zeros(nbytes, np.uint8), list[int]()
    is_ok = files.read(key, out, block, blocks.append)
    return is_ok, out, blocks


def the_file(files: PageFiles) -> Path:
    (path,) = files.directory.glob("*.page")
    return path


@pytest.fixture
def files(tmp_path: Path) -> PageFiles:
    return PageFiles(tmp_path / "stencil" / "pages", 1 << 20)


def test_entries_are_read_block_by_block(files: PageFiles) -> None:
    data = random_bytes()
    assert files.write(KEY, data, BLOCK)
    is_ok, out, blocks = read(PageFiles(files.directory, files.budget_bytes))
    assert is_ok
    assert np.array_equal(out, data)
    assert blocks == [0, 1, 2]


def test_blocks_are_there_when_they_are_announced(files: PageFiles) -> None:
    data, out = random_bytes(), np.zeros(NBYTES, np.uint8)
    files.write(KEY, data, BLOCK)
    seen = []
    files.read(KEY, out, BLOCK, lambda i: seen.append((out[: (i + 1) * BLOCK].copy(), out[(i + 1) * BLOCK :].any())))
    assert [rest for _, rest in seen] == [False] * 3
    assert all(np.array_equal(head, data[: len(head)]) for head, _ in seen)


def test_directory_and_files_are_accessible_to_the_owner_only(files: PageFiles) -> None:
    assert not files.directory.exists()
    files.write(KEY, random_bytes(), BLOCK)
    assert files.directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files.directory.iterdir()} == {0o600}


def test_a_missing_file_and_a_missing_directory_are_misses(files: PageFiles) -> None:
    assert not read(files)[0]
    files.delete(KEY)
    assert not files.directory.exists()
    files.write(KEY, random_bytes(), BLOCK)
    assert not read(files, "another key")[0]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOLCK])
def test_a_process_that_can_open_no_more_removes_no_sound_files(
    files: PageFiles, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Neither an entry nor one that another process is writing."""
    files.write(KEY, random_bytes(), BLOCK)
    with files._temporary(files._path("other"), NBYTES) as (name, _):
        with monkeypatch.context() as full:
            full.setattr(page_files, "_opened", raising(OSError(code, os.strerror(code))))
            assert not read(files)[0]
            with files._locked():
                files._make_room(0)
        assert name.exists()
    assert read(files)[0]


def raising(error: OSError) -> Callable[[Path], NoReturn]:
    def opened(_: Path) -> NoReturn:
        raise error

    return opened


def test_deleted_entries_are_gone(files: PageFiles) -> None:
    files.write(KEY, random_bytes(), BLOCK)
    files.delete(KEY)
    assert not read(files)[0]
    assert on_disk(files.directory) == 0


def test_a_templates_files_go_together(files: PageFiles) -> None:
    """Those of edits with adapters, too."""
    keys = ("t-latents", "t-0x1.0p+0", "t", "t+a-latents", "tt-latents", "../t-x/../y")
    for key in keys:
        assert files.write(key, random_bytes(), BLOCK)
    files.delete_template("t")
    assert [read(files, key)[0] for key in keys] == [False, False, False, False, True, True]


def test_a_template_that_is_deleted_while_it_is_written_is_no_fault_of_the_disk(
    files: PageFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As by another engine. Other entries are written at once."""
    real = page_files._write_entry

    def delete_then_write(fd: int, *entry: Any) -> None:
        PageFiles(files.directory, files.budget_bytes).delete_template("t")
        real(fd, *entry)

    monkeypatch.setattr(page_files, "_write_entry", delete_then_write)
    assert not files.write("t-latents", random_bytes(), BLOCK)
    assert on_disk(files.directory) == 0
    assert files.write("other", random_bytes(), BLOCK)
    assert caplog.messages == []


def test_one_entrys_file_goes_alone(files: PageFiles) -> None:
    for key in ("t-latents", "t-0x1.0p+0"):
        files.write(key, random_bytes(), BLOCK)
    files.delete("t-latents")
    assert [read(files, key)[0] for key in ("t-latents", "t-0x1.0p+0")] == [False, True]


def test_a_directory_open_to_others_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o755)
    PageFiles(tmp_path, 1 << 20)
    assert tmp_path.stat().st_mode & 0o7777 == 0o700
    assert not caplog.records


def test_a_directory_meant_for_everyone_stays_so_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o1777)
    files = PageFiles(tmp_path, 1 << 20)
    assert files.write(KEY, random_bytes(), BLOCK)
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777
    assert [record.name for record in caplog.records] == ["stencil.worker"]
    assert str(tmp_path) in caplog.text


def test_a_file_whose_time_cannot_be_set_is_read_all_the_same(
    files: PageFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_bytes()
    files.write(KEY, data, BLOCK)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    is_ok, out, _ = read(files)
    assert is_ok
    assert np.array_equal(out, data)
    assert the_file(files).exists()


# ------------------------------------------------------------------------------------------------------- damaged files


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero_a_page(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:8192] = bytes(4096)
    path.write_bytes(content)


def fill_with_text(path: Path) -> None:
    path.write_bytes(b"not a page" * (path.stat().st_size // 10) + b"." * (path.stat().st_size % 10))


def link_elsewhere(path: Path) -> None:
    target = path.parent / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage", [truncate, lengthen, empty, zero_a_page, fill_with_text, link_elsewhere, replace_by_pipe]
)
def test_a_damaged_file_is_a_miss_and_goes(files: PageFiles, damage: Callable[[Path], None]) -> None:
    data = random_bytes()
    files.write(KEY, data, BLOCK)
    path = the_file(files)
    damage(path)
    assert not read(files)[0]
    assert not os.path.lexists(path)
    assert files.write(KEY, data, BLOCK)
    assert read(files)[0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_a_miss(files: PageFiles, place: float, bit: int) -> None:
    data = random_bytes()
    assert files.write(KEY, data, BLOCK)
    path = the_file(files)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    is_ok, out, blocks = read(files)
    assert not is_ok
    assert not path.exists()
    for block in blocks:  # announced before the damage was met
        assert np.array_equal(out[block * BLOCK : (block + 1) * BLOCK], data[block * BLOCK : (block + 1) * BLOCK])


def test_another_keys_file_is_a_miss(files: PageFiles) -> None:
    files.write("other", random_bytes(1), BLOCK)
    foreign = the_file(files)
    files.write(KEY, random_bytes(2), BLOCK)
    (own,) = set(files.directory.glob("*.page")) - {foreign}
    foreign.replace(own)
    assert not read(files)[0]
    assert not own.exists()


def test_other_sizes_are_misses(files: PageFiles) -> None:
    files.write(KEY, random_bytes(), BLOCK)
    assert not read(files, nbytes=NBYTES - 1)[0]
    files.write(KEY, random_bytes(), BLOCK)
    assert not read(files, block=BLOCK // 2)[0]


def test_a_directory_in_an_entrys_place_is_neither_read_nor_removed(files: PageFiles) -> None:
    files.write(KEY, random_bytes(), BLOCK)
    path = the_file(files)
    path.unlink()
    (path / "inside").mkdir(parents=True)
    assert not read(files)[0]
    assert not files.write(KEY, random_bytes(), BLOCK)
    assert (path / "inside").exists()
    assert files.write("other", random_bytes(), BLOCK)


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_a_miss(files: PageFiles) -> None:
    files.write(KEY, random_bytes(), BLOCK)
    the_file(files).chmod(0)
    assert not read(files)[0]


def test_without_a_directory_nothing_is_kept_until_it_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is one log line at the start and one at the end; in between the disk is not accessed."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    in_the_way = tmp_path / "file"
    in_the_way.write_text("in the way")
    files = PageFiles(in_the_way / "pages", 1 << 20)
    for clock[0] in (0.0, page_files.RETRY_SECONDS - 1, page_files.RETRY_SECONDS + 1):
        assert not files.write(KEY, random_bytes(), BLOCK)
        assert not read(files)[0]
    in_the_way.unlink()
    clock[0] += page_files.RETRY_SECONDS - 1
    assert not files.write(KEY, random_bytes(), BLOCK)
    assert not in_the_way.exists()
    clock[0] += 2
    assert files.write(KEY, random_bytes(), BLOCK)
    assert files.write("other", random_bytes(), BLOCK)
    assert read(files)[0]
    assert [record.name for record in caplog.records] == ["stencil.worker"] * 2
    assert "Not a directory" in caplog.messages[0]
    assert caplog.messages[1].endswith("again")


def test_without_a_directory_nothing_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    files = PageFiles(tmp_path / "file" / "pages", 1 << 20)
    files.delete(KEY)
    files.delete_template(KEY)
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_full_disk_is_not_ok_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file sizes simulates a full disk: the same OSError from the same call."""
    code = f"""
import resource, signal
from pathlib import Path
import numpy as np
from model_executor.page_cache import page_files
from model_executor.page_cache.page_files import PageFiles
page_files.RETRY_SECONDS = 0.0
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
files = PageFiles(Path({str(tmp_path)!r}), 1 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
assert not files.write("large", np.ones(10_000, np.uint8), 4096)
assert [each.name for each in files.directory.iterdir()] == ["lock"]
assert files.write("small", np.ones(1_000, np.uint8), 4096)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 5000
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".page", ""]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    with mounted_tmpfs(tmp_path / "small", 64 * 1024) as folder:
        yield folder


def test_on_a_disk_smaller_than_the_budget_entries_make_room_for_each_other(small_disk: Path) -> None:
    files = PageFiles(small_disk / "pages", 1 << 20)
    written = [f"{n}" for n in range(12)]
    for key in written:
        assert files.write(key, random_bytes(), BLOCK)
    kept = [key for key in written if read(files, key)[0]]
    assert kept == written[-len(kept) :]
    assert 3 <= len(kept) <= 6


def test_a_disk_that_others_have_filled_evicts_nothing_and_is_used_again_when_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    files = PageFiles(small_disk / "pages", 1 << 20)
    assert files.write("first", random_bytes(), BLOCK)
    ballast = small_disk / "ballast"
    fill(ballast)
    assert not files.write("large", random_bytes(nbytes=30_000), BLOCK)
    assert read(files, "first")[0]
    assert {path.suffix for path in files.directory.iterdir()} == {".page", ""}
    ballast.unlink()
    clock[0] = page_files.RETRY_SECONDS + 1
    assert files.write("large", random_bytes(nbytes=30_000), BLOCK)
    assert read(files, "first")[0]


# ---------------------------------------------------------------------------------------------------------- the budget


def on_disk(directory: Path) -> int:
    total = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # a damaged or unwanted file goes without the lock
            total += path.lstat().st_size
    return total


def test_least_recently_used_goes_first(tmp_path: Path) -> None:
    files = PageFiles(tmp_path, 3 * 11_000)
    for key in "abc":
        files.write(key, random_bytes(), BLOCK)
    assert read(files, "a")[0]
    assert files.write("b", random_bytes(), BLOCK)  # there already, but asked for again
    files.write("d", random_bytes(), BLOCK)
    assert [read(files, key)[0] for key in "abcd"] == [True, True, False, True]


def test_an_entry_above_the_budget_evicts_nothing(tmp_path: Path) -> None:
    files = PageFiles(tmp_path, 15_000)
    assert files.write("a", random_bytes(), BLOCK)
    assert not files.write("b", random_bytes(nbytes=15_000), BLOCK)
    assert read(files, "a")[0]


def test_a_smaller_budget_holds_from_the_start(tmp_path: Path) -> None:
    files = PageFiles(tmp_path, 1 << 20)
    for key in "abcd":
        files.write(key, random_bytes(), BLOCK)
    smaller = PageFiles(tmp_path, 25_000)
    assert on_disk(tmp_path) <= 25_000
    assert [read(smaller, key)[0] for key in "abcd"] == [False, False, True, True]


def test_the_budget_holds_at_every_moment_and_for_all_processes(tmp_path: Path) -> None:
    """Three processes write to one directory while a fourth measures it, holding the lock, since files that come and go
    during a measurement would be counted together. Unfinished files count in full.
    """
    budget, nbytes = 400_000, 60_000
    code = """
import sys
from pathlib import Path
import numpy as np
from model_executor.page_cache.page_files import PageFiles
directory, budget, nbytes, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
files = PageFiles(directory, budget)
data = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
assert sum(files.write(f"{seed}-{n % 12}", data, 4096) for n in range(60)) >= 30
"""
    args = [str(tmp_path), str(budget), str(nbytes)]
    writers = [subprocess.Popen([sys.executable, "-c", code, *args, str(seed)]) for seed in range(3)]
    largest = 0
    while any(writer.poll() is None for writer in writers):
        largest = max(largest, locked_size(tmp_path))
        time.sleep(0.001)
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert budget - 2 * nbytes < largest <= budget
    files = PageFiles(tmp_path, budget)
    for seed in range(3):
        data = random_bytes(seed, nbytes)
        found = [read(files, f"{seed}-{n}", nbytes) for n in range(12)]
        assert all(np.array_equal(out, data) for is_ok, out, _ in found if is_ok)


def locked_size(directory: Path) -> int:
    if not (directory / "lock").exists():
        return 0
    with (directory / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return on_disk(directory)


def test_files_of_a_dead_writer_are_removed_and_those_of_a_living_one_stay(files: PageFiles) -> None:
    files.write(KEY, random_bytes(), BLOCK)
    stem = the_file(files).stem
    dead, living = (files.directory / f"{stem}.{digit * 16}.tmp" for digit in "ab")
    for path in (dead, living):
        path.write_bytes(bytes(1000))
    with living.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert files.write("other", random_bytes(), BLOCK)
        assert not dead.exists()
        assert living.exists()


def test_other_peoples_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine" * 10_000)
    (tmp_path / "notes.page").write_text("mine")
    files = PageFiles(tmp_path, 12_000)
    assert files.write("a", random_bytes(), BLOCK)
    assert files.write("b", random_bytes(), BLOCK)
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "notes.page").exists()


def test_reading_goes_on_while_the_directory_is_locked(files: PageFiles) -> None:
    files.write(KEY, random_bytes(), BLOCK)
    results = list[bool]()
    with (files.directory / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reader = threading.Thread(target=lambda: results.append(read(files)[0]))
        reader.start()
        reader.join(10)
    assert results == [True]
