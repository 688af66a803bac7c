"""RecordedServer: a server whose policy writes down what it is shown; what requests take that have it alone."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.load.client import Run, Target, checked, send_on_time, warm_up
from benchmarks.load.dataset import EditCall
from benchmarks.load.process_tree import processes
from benchmarks.load.server import Server, start_server
from benchmarks.serving.lone_run import LoneRun
from benchmarks.serving.recorded import FILE, Arrival, Batch, Recorded, read

SETTLE_SECONDS = 2.0
"""For idle work, such as priming, after the warm-ups."""

PAUSE_SECONDS = 0.1
"""Between requests that are sent one by one. In an open loop most find a server whose processes rest, which takes a
millisecond and a half longer to prepare one.
"""


@dataclass(frozen=True)
class RecordedServer:
    """path: of the records of its engines. Its methods raise WarmUpError if a request fails."""

    server: Server
    path: Path

    def send_one_by_one(self, target: Target, calls: Sequence[EditCall]) -> LoneRun:
        """target: this server, of one engine."""
        return self._recorded(warm_up(target, calls, 1, pause=PAUSE_SECONDS))

    def send_on_time(self, target: Target, calls: Sequence[EditCall], due: Sequence[float]) -> LoneRun:
        """In an open loop. due: seconds after the start."""
        return self._recorded(send_on_time(target, calls, due))

    def _recorded(self, sending: Coroutine[Any, Any, Run]) -> LoneRun:
        root = self.server.process.pid
        before = _cpu_beside_workers(root)
        run = checked(asyncio.run(sending))
        outside = (_cpu_beside_workers(root) - before + run.cpu_seconds) / len(run.outcomes)
        return LoneRun(run, *self.since(run.started), outside)

    def since(self, start: float) -> tuple[list[Arrival], list[Batch]]:
        """What has come and begun since `start`, in seconds of CLOCK_MONOTONIC."""
        arrivals, batches = read(self.path)
        return [each for each in arrivals if each.now >= start], [each for each in batches if each.started >= start]


@contextmanager
def recorded_server(
    flags: Sequence[str], policy: str, environment: Mapping[str, str] | None = None
) -> Iterator[RecordedServer]:
    """Its model is loaded. flags: without the policy's. policy: one that a Recorded asks. environment: what it adds to
    this process' own.
    """
    kind = next(kind for kind in Recorded.__subclasses__() if kind.inner == policy)
    flags = [*flags, "--scheduling-policy", f"{kind.__module__}:{kind.__name__}"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record"
        with start_server(flags, environment={FILE: str(path), **(environment or {})}) as server:
            server.wait_for("/ready")
            yield RecordedServer(server, path)


def _cpu_beside_workers(root: int) -> float:
    """CPU seconds so far of all processes of a server that are no workers."""
    others = [process for process in processes(root) if not any("stencil-worker" in arg for arg in process.cmdline())]
    return sum(times.user + times.system for times in map(psutil.Process.cpu_times, others))
