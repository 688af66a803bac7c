"""Children that a launcher forks: what they inherit, how their exit is noticed, and that they end with the launcher and
with the process that asked for them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import ipc_children
import psutil
import pytest

from core.ipc import launched_process
from core.ipc.launched_process import LaunchedProcess, launch
from core.ipc.local_sockets import address_of, listen, send
from core.ipc.logs import JsonFormatter
from core.ipc.process import SpawnedProcess, spawn
from core.ipc.ring import Channel

LEAST_SECONDS = 2.0
"""In which a process that must end has ended."""


class Launcher:
    """A launcher process and its address."""

    def __init__(self, target: str = "launcher", config: str = "") -> None:
        listener = listen()
        self.address = address_of(listener)
        self.process: SpawnedProcess = spawn(
            f"{ipc_children.__name__}:{target}", config.encode(), [listener.detach()], "stencil-launcher"
        )

    def child(self, target: str, config: bytes = b"", fds: tuple[int, ...] = ()) -> LaunchedProcess:
        return launch(self.address, f"{ipc_children.__name__}:{target}", config, fds, "stencil-worker-0")

    def num_fds(self) -> int:
        return psutil.Process(self.process.pid).num_fds()

    def end(self) -> None:
        self.process.kill()
        self.process.reap()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.end()


def read_all(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()


def sleeping() -> subprocess.Popen[bytes]:
    """A process that no launcher has forked, and so outlives all of them."""
    return subprocess.Popen(["sleep", "60"])


def is_gone(pidfd: int) -> bool:
    """Whether a process ends in time. Closes the descriptor."""
    ended, _, _ = select.select([pidfd], [], [], LEAST_SECONDS)
    os.close(pidfd)
    return bool(ended)


def test_a_child_gets_config_path_and_descriptors(launcher: Launcher) -> None:
    read_end, write_end = os.pipe()
    child = launcher.child("report", b"the prompt\nin two lines", (write_end,))
    os.close(write_end)
    report = json.loads(read_all(read_end))
    assert report["config"] == "the prompt\nin two lines"
    assert report["path"] == sys.path
    assert report["inheritable"] == [0, 1, 2]
    assert "stencil-worker-0" in report["argv"]
    assert not any("prompt" in argument for argument in report["argv"])
    assert report["comm"] == "stencil-worker-"
    assert (report["sigint"], report["sighup"], report["sigterm"]) == (True, True, False)
    assert report["blocked"] == []
    assert asyncio.run(child.wait()) == 0


def test_a_child_sees_what_the_process_that_asks_sees(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not what the launcher saw when it was started."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler := logging.StreamHandler()])
    handler.setFormatter(JsonFormatter("test"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINY_FLAG", "on")
    monkeypatch.delenv("HOME", raising=False)
    read_end, write_end = os.pipe()
    child = launcher.child("look_around", fds=(write_end,))
    os.close(write_end)
    seen = json.loads(read_all(read_end))
    assert asyncio.run(child.wait()) == 0
    assert seen["folder"] == str(tmp_path)
    assert seen["environment"]["TINY_FLAG"] == "on"
    assert "HOME" not in seen["environment"]
    (line,) = capfd.readouterr().err.splitlines()
    assert {"message": "looked around", "process": "stencil-worker-0"}.items() <= json.loads(line).items()


async def test_every_waiter_learns_the_exit(launcher: Launcher) -> None:
    child = launcher.child("leave", b"3")
    assert child.describe_exit() == "running"
    assert await asyncio.gather(*(child.wait() for _ in range(5))) == [3] * 5
    assert await child.wait() == child.returncode == 3
    child.kill()  # harmless now


async def test_a_failing_target_is_exit_code_1(launcher: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    assert await launch(launcher.address, "no_such_module:main", b"", [], "lost").wait() == 1
    assert "no_such_module" in capfd.readouterr().err
    assert await launcher.child("leave", b"0").wait() == 0, "the launcher goes on"


async def test_a_child_that_ends_leaves_nothing_undone(launcher: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    read_end, write_end = os.pipe()
    child = launcher.child("leave_something", fds=(write_end,))
    os.close(write_end)
    assert await child.wait() == 0
    assert read_all(read_end) == b"by a thread, at exit"
    assert capfd.readouterr().out == "buffered"


async def test_a_child_that_ends_copies_nothing_that_it_shares() -> None:
    """An interpreter that frees its objects writes to all of them."""
    launcher = Launcher("large_launcher")
    num_faults = []
    for target in ("return_at_once", "leave"):  # `sys.exit` raises, and so takes the interpreter's way
        before = num_faults_of_children(launcher.process.pid)
        assert await launcher.child(target, b"0").wait() == 0
        num_faults.append(num_faults_of_children(launcher.process.pid) - before)
    launcher.end()
    assert num_faults[0] < num_faults[1] / 2


def num_faults_of_children(pid: int) -> int:
    """Pages that children which have ended had copied or mapped: cminflt of proc(5)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[8])


async def test_signals_arrive(launcher: Launcher) -> None:
    """SIGTERM is ignored, as the launcher ignores it; a stopped child can be killed."""
    read_end, write_end = os.pipe()
    child = launcher.child("tell_pid", fds=(write_end,))
    os.close(write_end)
    pid = int(os.read(read_end, 20))
    child.terminate()
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(0.05)
    assert child.returncode is None
    assert child.pid == pid
    pidfd = os.pidfd_open(pid)
    os.kill(launcher.process.pid, signal.SIGSTOP)
    child.kill()
    assert is_gone(pidfd), "also while the launcher is busy"
    os.kill(launcher.process.pid, signal.SIGCONT)
    assert await child.wait() == -signal.SIGKILL
    assert child.describe_exit() == "killed by signal 9 (SIGKILL)"
    os.close(read_end)


async def test_a_launcher_that_hangs_hides_no_exit(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched_process, "ANSWER_SECONDS", 0.2)
    read_end, write_end = os.pipe()
    child = launcher.child("tell_pid", fds=(write_end,))
    waiters = [asyncio.create_task(child.wait()) for _ in range(3)]
    pid = int(await asyncio.to_thread(os.read, read_end, 20))
    await settled(lambda: child.pid == pid)
    os.kill(launcher.process.pid, signal.SIGSTOP)
    await asyncio.sleep(0.5)
    assert child.returncode is None
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.wait_for(asyncio.gather(*waiters), LEAST_SECONDS) == [-signal.SIGKILL] * 3
    assert child.describe_exit() == "ended with its launcher"
    os.kill(launcher.process.pid, signal.SIGCONT)
    os.close(read_end)
    os.close(write_end)
    assert await launcher.child("leave", b"0").wait() == 0, "it goes on"


async def test_a_killed_launcher_takes_its_children_along(launcher: Launcher) -> None:
    read_end, write_end = os.pipe()
    child = launcher.child("tell_pid", fds=(write_end,))
    os.close(write_end)
    pidfd = os.pidfd_open(int(os.read(read_end, 20)))
    launcher.process.kill()
    assert await asyncio.wait_for(child.wait(), LEAST_SECONDS) == -signal.SIGKILL
    assert is_gone(pidfd)
    os.close(read_end)
    with pytest.raises(ConnectionRefusedError):
        launcher.child("sleep")


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


@pytest.mark.parametrize("at_limit", [False, True])
async def test_a_child_ends_no_sooner_than_it_does_when_its_launcher_dies(at_limit: bool) -> None:
    """A dying process closes its sockets before the kernel ends its children: they may still write to what they map.
    Also where the child is told of while this process has all the descriptors that it may have."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifeline, writer = os.pipe()
    with sleeping() as child:
        pidfd = os.pidfd_open(child.pid)
        send(theirs, b"%d" % child.pid, [pidfd])
        theirs.close()
        launched = LaunchedProcess("stencil-worker-0", ours, ours.dup(), writer)
        with no_descriptor_left() if at_limit else nullcontext():
            waiters = [asyncio.create_task(launched.wait()) for _ in range(2)]
            await asyncio.sleep(0.05)
            assert not any(each.done() for each in waiters)
        assert (launched.returncode, launched.pid) == (None, child.pid)
        launched.kill()
        assert await asyncio.wait_for(asyncio.gather(*waiters), LEAST_SECONDS) == [-signal.SIGKILL] * 2
    assert launched.describe_exit() == "ended with its launcher"
    for fd in (pidfd, lifeline):
        os.close(fd)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_child_does_not_outlive_the_process_that_asked_for_it(launcher: Launcher, stopped: bool) -> None:
    """Also one that cannot run. Its sibling, which this process asked for, does."""
    read_end, write_end = os.pipe()
    parent = spawn(f"{ipc_children.__name__}:launches", launcher.address.encode(), [write_end], "parent")
    pid = int(os.read(read_end, 20))
    sibling = launcher.child("tell_pid", fds=(write_end,))
    os.read(read_end, 20)
    pidfd = os.pidfd_open(pid)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.reap()
    assert is_gone(pidfd)
    assert sibling.returncode is None
    sibling.kill()
    assert asyncio.run(sibling.wait()) == -signal.SIGKILL
    os.close(read_end)
    os.close(write_end)


async def test_a_child_that_is_killed_before_it_starts_never_lives_on(tmp_path: Path) -> None:
    """The launcher is still importing: the exit is known at once all the same, and the next child is forked."""
    launcher = Launcher("slow_launcher", str(tmp_path / "go"))
    read_end, write_end = os.pipe()
    first, second = (launcher.child("tell_pid", fds=(write_end,)) for _ in range(2))
    waiter = asyncio.create_task(first.wait())
    await asyncio.sleep(0.01)
    first.kill()
    assert first.returncode == -signal.SIGKILL
    assert await asyncio.wait_for(waiter, LEAST_SECONDS) == -signal.SIGKILL
    (tmp_path / "go").touch()
    await asyncio.to_thread(os.read, read_end, 20)
    await settled(lambda: len(psutil.Process(launcher.process.pid).children()) == 1)
    assert second.returncode is None
    assert [child.pid for child in psutil.Process(launcher.process.pid).children()] == [second.pid]
    second.kill()
    await second.wait()
    launcher.end()
    os.close(read_end)
    os.close(write_end)


async def test_no_descriptor_is_left_open(launcher: Launcher) -> None:
    await launcher.child("leave", b"0").wait()
    before, theirs = len(os.listdir("/proc/self/fd")), launcher.num_fds()
    for _ in range(3):
        channel, fds = Channel.create()
        child = launcher.child("echo", fds=fds)
        channel.close_child_fds()
        channel.send(b"x")
        assert await anext(channel.messages()) == b"x"
        channel.close()
        assert await child.stop(grace=20) == 0
    await settled(lambda: launcher.num_fds() <= theirs)  # what is left of the first is closed after its exit is known
    assert len(os.listdir("/proc/self/fd")) == before


async def settled(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
