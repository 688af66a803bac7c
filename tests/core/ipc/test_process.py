"""Child processes: what they inherit, how their exit is noticed, and that they never outlive their parent."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipc_children
import pytest
import uvloop

from core.errors import EngineError
from core.ipc import process
from core.ipc.process import EX_PARENT_GONE, ChildProcess, readable, spawn
from core.ipc.ring import Channel

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
        yield runner


def child_of(target: str, config: bytes = b"", fds: tuple[int, ...] = ()) -> ChildProcess:
    return spawn(f"{ipc_children.__name__}:{target}", config, fds, target)


def read_all(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def report() -> Iterator[dict[str, Any]]:
    """What a child with a long name and a secret config knows about itself."""
    read_end, write_end = os.pipe()
    child = spawn(f"{ipc_children.__name__}:report", b"the prompt\nin two lines", [write_end], "stencil-worker-0 of 2")
    os.close(write_end)
    yield {"pid": child.pid} | json.loads(read_all(read_end))
    asyncio.run(child.wait())


def test_a_child_gets_config_path_and_descriptors(report: dict[str, Any]) -> None:
    assert report["config"] == "the prompt\nin two lines"
    assert report["path"] == sys.path
    assert {0, 1, 2, *report["fds"]} < set(report["open"])
    assert len(report["open"]) == 4 + len(report["fds"]), "besides them, only its lifeline"
    assert report["inheritable"] == [0, 1, 2]


def test_argv_shows_the_name_and_no_config(report: dict[str, Any]) -> None:
    assert "stencil-worker-0 of 2" in report["argv"]
    assert not any("prompt" in argument for argument in report["argv"])
    assert report["comm"] == "stencil-worker-"


def test_a_child_leaves_ctrl_c_and_hangups_to_its_parent(report: dict[str, Any]) -> None:
    assert report["sigint"]
    assert report["sighup"]
    assert report["sigterm"]
    assert report["blocked"] == []
    assert not {signal.SIGINT, signal.SIGHUP} & signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert report["group"] == os.getpgrp()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
async def test_ctrl_c_and_hangups_while_a_child_starts(number: signal.Signals) -> None:
    child = child_of("sleep")
    for _ in range(30):
        os.kill(child.pid, number)
        await asyncio.sleep(0.01)
    assert child.returncode is None
    child.kill()
    await child.wait()


def test_every_waiter_learns_the_exit(runner: asyncio.Runner) -> None:
    async def main() -> None:
        child = child_of("leave", b"3")
        assert child.describe_exit() == "running"
        assert await asyncio.gather(*(child.wait() for _ in range(5))) == [3] * 5
        assert await child.wait() == child.returncode == 3
        assert child.describe_exit() == "exit code 3"
        child.kill()  # harmless now

    runner.run(main())


async def test_a_cancelled_waiter_disturbs_no_other() -> None:
    child = child_of("sleep")
    first, second = (asyncio.ensure_future(child.wait()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    child.kill()
    assert await second == -9
    assert child.describe_exit() == "killed by signal 9 (SIGKILL)"


async def test_a_failing_target_is_exit_code_1(capfd: pytest.CaptureFixture[str]) -> None:
    assert await spawn("no_such_module:main", b"", [], "lost").wait() == 1
    assert "no_such_module" in capfd.readouterr().err


async def test_stop_waits_for_a_child_that_leaves_by_itself() -> None:
    assert await child_of("leave", b"0").stop(grace=20) == 0


async def test_stop_terminates_after_the_grace() -> None:
    assert await child_of("sleep").stop(grace=0.1) == -signal.SIGTERM


async def test_stop_kills_a_child_that_ignores_termination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_TERM_SECONDS", 0.1)
    read_end, write_end = os.pipe()
    child = child_of("stubborn", fds=(write_end,))
    assert os.read(read_end, 1) == b"x"
    assert await child.stop(grace=0.1) == -signal.SIGKILL
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, " (SIGKILL)"), (signal.SIGRTMIN + 1, "")])
async def test_the_end_by_any_signal_is_described(number: int, name: str) -> None:
    """Some of the real-time signals have no name."""
    child = child_of("sleep")
    os.kill(child.pid, number)
    assert await child.wait() == -number
    assert child.describe_exit() == f"killed by signal {number}{name}"


async def test_stop_gives_up_on_a_process_that_the_kernel_cannot_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that survives SIGKILL cannot be made; here the signal is withheld."""
    for limit in ("_TERM_SECONDS", "_KILL_SECONDS"):
        monkeypatch.setattr(process, limit, 0.05)
    child = child_of("sleep")
    with monkeypatch.context() as withheld:
        withheld.setattr(child, "terminate", lambda: None)
        withheld.setattr(child, "kill", lambda: None)
        with pytest.raises(EngineError, match="does not end"):
            await child.stop(grace=0)
    child.kill()
    await child.wait()


def test_no_descriptor_is_left_open(runner: asyncio.Runner) -> None:
    async def main() -> None:
        for _ in range(3):
            channel, fds = Channel.create()
            child = child_of("echo", fds=fds)
            channel.send(b"x")
            assert await anext(channel.messages()) == b"x"
            channel.close()
            assert await child.stop(grace=20) == 0
        with pytest.raises(OSError, match="Bad file descriptor"):
            spawn("a:b", b"", [99999], "bad descriptor")

    runner.run(asyncio.sleep(0))  # the loop opens its own
    before = open_fds()
    runner.run(main())
    assert open_fds() == before  # and with that all memory is gone: none of it has a name


def test_a_child_that_cannot_be_watched_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is left to watch it with. Nobody has it, so nobody else would end it."""

    def pidfd_open(_pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    read_end, write_end = os.pipe()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", pidfd_open)
        with pytest.raises(OSError, match="Too many open files"):
            child_of("sleep", fds=(write_end,))
    os.close(write_end)
    assert select.select([read_end], [], [], 5.0)[0], "its end of the pipe is closed"
    os.close(read_end)


def test_no_process_outlives_a_killed_grandparent() -> None:
    """`kill -9` of the head of a tree whose members sleep, spin, or are importing: all are gone within 2 s."""
    targets = ["grand:sleep", "grand:spin", "import_torch"]
    read_end, write_end = os.pipe()
    head = child_of("family", json.dumps(targets).encode(), (write_end,))
    os.close(write_end)
    pids: set[int] = set()
    with open(read_end) as file:
        while len(pids) < 1 + 2 + 2 + 1:
            pids.add(int(file.readline()))
        pidfds = [os.pidfd_open(pid) for pid in pids]
        head.kill()
        assert all_gone(pidfds, seconds=2.0)
        assert file.read() == ""  # EOF: no process that we do not know of holds the pipe either
    for fd in pidfds:
        os.close(fd)
    assert asyncio.run(head.wait()) == -9


def all_gone(pidfds: list[int], seconds: float) -> bool:
    waiting, deadline = set(pidfds), time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        waiting -= set(select.select(list(waiting), [], [], deadline - time.monotonic())[0])
    return not waiting


def test_cleanup_runs_when_the_parent_is_gone(tmp_path: Path) -> None:
    """A middle process spawns the child and dies. Its cleanup runs even though another one fails."""
    (tmp_path / "sockets").mkdir()
    read_end, write_end = os.pipe()
    code = (
        "import os, sys, ipc_children; from core.ipc.process import spawn;"
        "child = spawn('ipc_children:remove_directory', sys.argv[1].encode(), [int(sys.argv[2])], 'cleaner');"
        "os.write(int(sys.argv[2]), b'%d\\n' % child.pid); sys.stdin.read()"
    )
    middle = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "sockets"), str(write_end)],
        pass_fds=[write_end],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    os.close(write_end)
    with middle, open(read_end) as file:
        lines = {file.readline().strip(), file.readline().strip()}
        pidfd = os.pidfd_open(int(max(lines - {"ready"})))
        assert "ready" in lines
        middle.kill()
    assert all_gone([pidfd], seconds=2.0)
    os.close(pidfd)
    assert not (tmp_path / "sockets").exists()


async def test_exit_code_of_a_child_whose_lifeline_ends() -> None:
    child = child_of("sleep")
    os.close(child._open_fds[0])  # what the parent's end does
    child._open_fds[0] = os.open("/dev/null", os.O_RDONLY)
    assert await child.wait() == EX_PARENT_GONE
    assert child.describe_exit() == "exit code 69 (its parent is gone)"


async def test_a_watch_that_cannot_be_made_leaves_nothing() -> None:
    read_end, write_end = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Bad file descriptor"):
        await readable(read_end, -1)
    assert len(os.listdir("/proc/self/fd")) == before
    os.write(write_end, b"x")
    await asyncio.wait_for(readable(read_end), 10.0)
    os.close(read_end)
    os.close(write_end)
