"""A server started as a user starts it, on a free port, and stopped as an operator stops it."""

from __future__ import annotations

import ctypes
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
STENCIL = "entrypoints.serve"
READY_SECONDS = 300.0
STOP_SECONDS = 90.0
_LIBC, _PR_SET_PDEATHSIG = ctypes.CDLL(None), 1  # prctl(2)


@dataclass(frozen=True)
class Server:
    """A running server. started: when its process was spawned, in seconds of CLOCK_MONOTONIC."""

    process: subprocess.Popen[bytes]
    host: str
    port: int
    started: float

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def wait_for(self, path: str) -> float:
        """Ask `path` until it answers 200; seconds since the start. Raises RuntimeError if the process ends before."""
        while time.monotonic() - self.started < READY_SECONDS:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server left with status {self.process.returncode}")
            if self._answers(path):
                return time.monotonic() - self.started
            time.sleep(0.02)
        raise TimeoutError(f"{path} did not answer within {READY_SECONDS:g} s")

    def _answers(self, path: str) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=5.0)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


@contextmanager
def start_server(
    flags: Sequence[str] = (),
    module: str = STENCIL,
    *,
    root: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    log: IO[bytes] | None = None,
) -> Iterator[Server]:
    """Spawn ``python -m entrypoints.serve``, or another module that takes a --port; it may not answer yet. Stopped on
    leaving.

    root: the source tree to run in. environment: added to this process' own. log: the server's stderr, instead of this
    process' own.
    """
    host, port = "127.0.0.1", free_port()
    quiet = ["--log-level", "warning"] if module == STENCIL else []
    command = [sys.executable, "-m", module, "--port", str(port), *quiet, *flags]
    started = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=root,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=log,
        preexec_fn=end_with_parent,  # noqa: PLW1509 - a system call alone, which takes no lock
    ) as process:
        try:
            yield Server(process, host, port, started)
        finally:
            _stop(process)


@contextmanager
def ready_server(flags: Sequence[str] = (), module: str = STENCIL) -> Iterator[Server]:
    """A server whose model is loaded."""
    with start_server(flags, module) as server:
        server.wait_for("/ready")
        yield server


def end_with_parent() -> None:
    """In a child process before exec: the kernel sends it SIGTERM when its parent ends for any reason."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
