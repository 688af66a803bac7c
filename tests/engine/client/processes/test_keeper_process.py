"""The keeper is replaced when it dies, also where it cannot be at first. Its process is a fake."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence

import pytest

from engine.client.processes import keeper_process
from engine.client.processes.keeper_process import KeeperProcess


class Process:
    """Stands for a ChildProcess."""

    def __init__(self) -> None:
        self._gone = asyncio.Event()

    async def wait(self) -> int:
        await self._gone.wait()
        return -9

    def kill(self) -> None:
        self._gone.set()

    def describe_exit(self) -> str:
        return "killed by signal 9 (SIGKILL)"


async def test_a_keeper_that_cannot_be_started_again_at_once_is_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its share of the listening socket is closed each time."""
    spawned: list[Process] = []
    refusals = [errno.ENOMEM, errno.EMFILE]
    given: list[int] = []

    def spawn(_target: str, _config: bytes, fds: Sequence[int], _name: str) -> Process:
        if spawned and refusals:
            given.extend(fds)
            raise OSError(refusals[-1], os.strerror(refusals.pop()))
        os.close(fds[0])
        spawned.append(Process())
        return spawned[-1]

    monkeypatch.setattr(keeper_process, "spawn", spawn)
    monkeypatch.setattr("core.restarts.FIRST_WAIT_SECONDS", 0.01)
    keeper = KeeperProcess()
    keeper.start()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(keeper.run())
        spawned[0].kill()
        while len(spawned) == 1:
            await asyncio.sleep(0.005)
        await keeper.close()
    assert not refusals
    assert "cannot be started: [Errno 12] Cannot allocate memory" in caplog.text
    for fd in given:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
