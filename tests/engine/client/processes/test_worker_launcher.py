"""The launcher of a process runs while somebody uses it, and is shared."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

import pytest

from core.config import EngineConfig, ModelConfig
from core.ipc.local_sockets import connect
from engine.client.processes import worker_launcher
from engine.client.processes.worker_launcher import WorkerLauncher, needs_launcher


def serves(address: str) -> bool:
    try:
        connect(address).close()
    except ConnectionRefusedError:
        return False
    return True


def test_it_is_shared_and_ends_with_its_last_user() -> None:
    launcher = WorkerLauncher()
    with launcher.used() as first:
        with launcher.used() as second:
            assert second == first
        assert serves(first)
    assert not serves(first)
    with launcher.used() as third:
        assert serves(third)
    assert not serves(third)


def test_a_dead_one_is_replaced_for_the_next_user() -> None:
    launcher = WorkerLauncher()
    with launcher.used() as first:
        assert launcher._process is not None
        launcher._process.kill()
        launcher._process.reap()
        assert not serves(first)
        with launcher.used() as second:
            assert serves(second)


def test_without_one_there_is_no_address(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    launcher, before = WorkerLauncher(), len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(worker_launcher, "spawn", full)
        with launcher.used() as address:
            assert address == ""
    assert "no memory" in caplog.text
    assert len(os.listdir("/proc/self/fd")) == before
    with launcher.used() as address:
        assert serves(address)
    assert not serves(address)


def test_a_forked_copy_has_its_own() -> None:
    launcher = worker_launcher.worker_launcher
    with launcher.used() as address:
        pid = os.fork()
        if not pid:
            with suppress(BaseException):
                with launcher.used() as other:
                    is_own = other != address and serves(other)
                os._exit(0 if is_own and not serves(other) and serves(address) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert serves(address), "the copy ended its own"


@pytest.mark.parametrize(
    ("device", "has_driver", "needed"),
    [("auto", False, True), ("cpu", True, True), ("auto", True, False), ("cuda", True, False), ("cuda", False, False)],
)
def test_only_workers_of_cpus_are_forked(
    monkeypatch: pytest.MonkeyPatch, device: str, has_driver: bool, needed: bool
) -> None:
    monkeypatch.setattr(worker_launcher, "has_gpu_driver", lambda: has_driver)
    assert needs_launcher(EngineConfig(models=(ModelConfig(device=device),))) is needed


def test_workers_that_compile_are_not_forked() -> None:
    """The launcher has left out the compiler."""
    models = (ModelConfig(device="cpu"), ModelConfig(served_model_name="other", device="cpu", kernels="compile"))
    assert not needs_launcher(EngineConfig(models=models))
    assert needs_launcher(EngineConfig(models=models[:1]))
