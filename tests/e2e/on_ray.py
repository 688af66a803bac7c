"""Engines of the end-to-end tests on two machines of a Ray cluster, with `pytest --on-ray`: nothing else about a test
changes. What looks for processes finds those on the machines, too.

Not for tests of what is there on one machine alone: what an engine inherits of its parent (variables of the
environment, limits of files), memory that is mapped by all processes, the launcher and keeper that engines share, how a
server with its children starts and ends, offline use. Which files it is for: `ON_RAY` in the Makefile; single tests in
them are left out by the marker `one_machine`. Of two AsyncEngines at a time in this process, the second one is here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.load.ray_machines import Machines, machines
from benchmarks.load.server import ROOT

CORES = 8
"""Of each machine: for the engines of one test while those of the one before end."""

TICK = 0.01
"""Seconds by which a process may seem older than it is."""

_REDIRECT = "exec(compile(open({0!r}).read(), {0!r}, 'exec'), {{'__file__': {0!r}}})\n"


@dataclass
class _Place:
    """machines: None: engines are where the tests are. shims: a folder on the path of all that runs on machines.
    has_joined: an AsyncEngine of this process has its engines there, which joins Ray once. since: when the last one
    that had was started, seconds as psutil's.
    """

    machines: Machines | None = None
    shims: Path = Path()
    has_joined: bool = False
    since: float = math.inf


_place = _Place()


@contextmanager
def placed_there(folder: Path) -> Iterator[None]:
    """Engines that start meanwhile are on machines. folder: for their files."""
    shims = folder / "shims"
    shims.mkdir()
    path = f"{shims}:{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'e2e'}"  # users' classes are among the tests
    with machines(folder, CORES, PYTHONPATH=path) as found:
        _place.machines, _place.shims = found, shims
        yield
        _place.machines = None


@contextmanager
def settings() -> Iterator[dict[str, Any]]:
    """Of the EngineConfig of an AsyncEngine that lives meanwhile."""
    if _place.machines is None or _place.has_joined:
        yield {}
        return
    _place.has_joined, _place.since = True, psutil.boot_time() + time.clock_gettime(time.CLOCK_BOOTTIME) - TICK
    try:
        yield {"data_parallel_backend": "ray", "ray_address": _place.machines.address}
    finally:
        _place.has_joined = False


def flags() -> tuple[str, ...]:
    """Of a server."""
    return (
        () if _place.machines is None else ("--data-parallel-backend", "ray", "--ray-address", _place.machines.address)
    )


def hosts() -> list[psutil.Process]:
    """Processes of the machines that run hosts of engines."""
    return [] if _place.machines is None else _place.machines.hosts


def engines() -> list[psutil.Process]:
    """Those of this process's last AsyncEngine there, not of servers, which were started before."""
    return [child for host in hosts() for child in _children(host) if child.create_time() >= _place.since]


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children()
    return []


def inject(folder: Path | None) -> None:
    """Have processes that start on machines run this folder's `sitecustomize.py`; None: no longer."""
    if _place.machines is not None:
        file = "" if folder is None else _REDIRECT.format(str(folder / "sitecustomize.py"))
        (_place.shims / "sitecustomize.py").write_text(file)
