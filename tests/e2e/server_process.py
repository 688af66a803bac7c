"""Runs the real server as a child process: starts it, waits until it is ready, stops it, and checks that nothing is
left.

`start` starts it as a user does. `fork` takes a fifth of the processor time, see `forked_server.py`: for tests of what
a server does once it is ready.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import on_ray
import psutil
from forked_server import ForkedServer, warm_process

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS = 120.0
EXIT_SECONDS = 30.0


@dataclass
class ServerProcess:
    """A started server; `log` and `scratch` are its stderr and its temporary directory."""

    process: subprocess.Popen[str] | ForkedServer
    url: str
    log: Path
    scratch: Path

    @property
    def base_url(self) -> str:
        """The base URL for an OpenAI client."""
        return f"{self.url}/v1"

    def children(self) -> list[psutil.Process]:
        """Those on machines, too, where a server that started before has its own."""
        server = psutil.Process(self.process.pid)
        there = [child for host in on_ray.hosts() for child in host.children(recursive=True)]
        mine = [child for child in there if child.create_time() >= server.create_time()]
        return [*server.children(recursive=True), *mine]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and assert that no child and no file is left. Returns the exit status."""
        children = self.children()
        self.process.send_signal(number)
        return self.wait(children)

    def wait(self, children: Sequence[psutil.Process]) -> int:
        status = self.process.wait(EXIT_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive, f"left behind: {alive}"
        left = list(self.scratch.iterdir())
        assert not left, f"left behind: {left}"
        return status


def spawn(scratch: Path, *flags: str) -> subprocess.Popen[str]:
    """Start ``python -m entrypoints.serve`` on a free port; stdout is a pipe, stderr goes to ``<scratch>.log``."""
    scratch.mkdir()
    command = [sys.executable, "-m", "entrypoints.serve", "--port", "0", *on_ray.flags(), *flags]
    with scratch.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(scratch),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=_notice_hangups,  # noqa: PLW1509 - a system call alone, which takes no lock
        )


def _environment(scratch: Path) -> dict[str, str]:
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # set by diffusers' import in the tests themselves
    return environment


def _notice_hangups() -> None:
    """Run in the child: under `nohup` it would otherwise inherit that SIGHUP is ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start(scratch: Path, *flags: str) -> ServerProcess:
    """Start a server and wait until it is ready; its address comes from its ready line."""
    return _once_ready(spawn(scratch, *flags), scratch)


def fork(scratch: Path, *flags: str) -> ServerProcess:
    """As `start`, but forked."""
    return _once_ready(spawn_forked(scratch, *flags), scratch)


def spawn_forked(scratch: Path, *flags: str) -> ForkedServer:
    """As `spawn`, but forked."""
    scratch.mkdir()
    return warm_process().fork(
        ("--port", "0", *on_ray.flags(), *flags), _environment(scratch), ROOT, scratch.with_suffix(".log")
    )


def _once_ready(process: subprocess.Popen[str] | ForkedServer, scratch: Path) -> ServerProcess:
    log = scratch.with_suffix(".log")
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("Stencil ready on http://"):
        process.kill()
        raise AssertionError(f"not ready: {line!r}\n{log.read_text()}")
    server = ServerProcess(process, line.split()[3], log, scratch)
    wait_until_ready(server.url)
    return server


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while httpx.get(f"{url}/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
