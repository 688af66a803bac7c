"""The processes of a server, their memory and descriptors over time, and how fast those grow."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
import psutil

from benchmarks.load.process_tree import own_bytes_of
from benchmarks.load.ray_machines import Machines

Role = Literal["server", "engine", "worker", "images", "launcher", "weights", "host"]
ROLES: tuple[Role, ...] = get_args(Role)
MB = 1e6

WORKER_WARM_UP_SECONDS = 120.0
"""From a worker's start: it loads, and then caches compiled operators of the shapes that it meets up to a limit
(model_executor/worker/main.py)."""
PAIR_SECONDS = 20.0, 60.0  # least and most time between two samples of a worker that make a slope

_NAME = re.compile(r"stencil-(engine|worker|images|launcher|weights)(?:-(\d+))?")


@dataclass(frozen=True)
class Member:
    """One process. engine: index of its engine; 0 where it belongs to none, -1 for a host that has not started it."""

    role: Role
    engine: int
    process: psutil.Process


class Tree:
    """All processes below the server `pid`, itself included, and on its engines' machines. num_ranks: workers of each
    engine.
    """

    def __init__(self, pid: int, num_ranks: int, machines: Machines | None = None) -> None:
        self._server = psutil.Process(pid)
        self._num_ranks = num_ranks
        self.machines = machines

    def members(self) -> list[Member]:
        """The processes that are alive."""
        return [Member("server", 0, self._server), *self._below(self._server), *self._on_machines()]

    def of(self, role: Role, engine: int | None = None) -> list[Member]:
        """Processes of a role, of one engine or of all."""
        return [m for m in self.members() if m.role == role and engine in (None, m.engine)]

    def _on_machines(self) -> Iterator[Member]:
        for host in () if self.machines is None else self.machines.hosts:
            family = [*self._below(host)]
            yield Member("host", next((each.engine for each in family if each.role == "engine"), -1), host)
            yield from family

    def _below(self, parent: psutil.Process) -> Iterator[Member]:
        """A worker is a child of its engine, or of the launcher that forked it; its number counts over all engines."""
        for child in _children(parent):
            match = _name(child)
            if match is None:
                continue
            role, number = cast(Role, match[1]), int(match[2] or 0)
            yield Member(role, number // self._num_ranks if role == "worker" else number, child)
            yield from self._below(child)


def _children(parent: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return list(parent.children())
    return []


def _name(process: psutil.Process) -> re.Match[str] | None:
    """The name that the server gave it, a word of its command line."""
    with suppress(psutil.Error):
        return next(filter(None, map(_NAME.fullmatch, process.cmdline())), None)
    return None


def processes_of(folder: Path, variable: str = "TMPDIR") -> list[psutil.Process]:
    """Every process of this machine in whose environment the variable is the folder, orphans included."""
    mark = f"{variable}={folder}".encode()
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def shared_memory_files() -> set[str]:
    """Names in /dev/shm that could be ours."""
    with suppress(FileNotFoundError):
        return {name for name in os.listdir("/dev/shm") if "stencil" in name}
    return set()


@dataclass(frozen=True)
class WorkerMemory:
    """age: seconds since its process started. memory: bytes."""

    pid: int
    age: float
    memory: int


@dataclass(frozen=True)
class Holdings:
    """Of a tree, by role. memory: bytes without mapped files; what n processes share counts 1/n in each."""

    memory: Counter[str] = field(default_factory=Counter)
    fds: Counter[str] = field(default_factory=Counter)
    workers: list[WorkerMemory] = field(default_factory=list)


def holdings(tree: Tree) -> Holdings:
    """At this moment; a process that ends meanwhile is left out."""
    held = Holdings()
    for member in tree.members():
        with suppress(psutil.Error, OSError, ValueError):
            memory = own_bytes_of(member.process.pid)
            held.fds[member.role] += member.process.num_fds()
            held.memory[member.role] += memory
            if member.role == "worker":
                age = time.time() - member.process.create_time()
                held.workers.append(WorkerMemory(member.process.pid, age, memory))
    return held


@dataclass(frozen=True)
class Sample:
    """seconds: since the start of the traffic. is_whole: whether all engines served."""

    seconds: float
    held: Holdings
    is_whole: bool


class Samples:
    """Samples count after the warm-up and, except for the API server's own, while all engines served: one that is
    starting holds less. Restarts make the workers' memory a saw that hides a leak, which `worker_growth` shows.
    """

    def __init__(self, warm_up_seconds: float) -> None:
        self._warm_up_seconds = warm_up_seconds
        self._samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def memory_slope(self, *roles: Role) -> float:
        """MB per minute by least squares over the minutes' medians, of these roles or all; NaN below three minutes."""
        minutes = self._minutes(lambda held: _sum(held.memory, roles) / MB, roles)
        if len(minutes) < 3:
            return float("nan")
        times, values = np.array(minutes).T
        return float(np.polyfit(times, values, deg=1)[0])

    def worker_growth(self) -> float:
        """MB per minute of a warm worker: the median slope over all pairs of near samples of one process (Theil-Sen
        estimator), which ignores the single jump of its heap at the largest batch so far. NaN without such pairs.
        """
        slopes = [_slopes(*life) for life in self._warm_lives()]
        every = np.concatenate(slopes) if slopes else np.empty(0)
        return float(np.median(every)) if len(every) else float("nan")

    def warm_worker(self) -> float:
        """Median MB of a warm worker; NaN without samples."""
        sizes = [size for _, sizes in self._warm_lives() for size in sizes]
        return statistics.median(sizes) if sizes else float("nan")

    def num_worker_lives(self) -> int:
        """Number of processes behind `worker_growth`."""
        return len(self._warm_lives())

    def ends(self, value: Callable[[Holdings], float], *roles: Role) -> tuple[float, float]:
        """Values of the first and the last minute; NaN without samples."""
        minutes: Sequence[tuple[float, float]] = self._minutes(value, roles) or [(0.0, float("nan"))]
        return minutes[0][1], minutes[-1][1]

    def memory(self, *roles: Role) -> tuple[float, float]:
        """MB, in the first and the last minute."""
        return self.ends(lambda held: _sum(held.memory, roles) / MB, *roles)

    def fds(self, *roles: Role) -> tuple[float, float]:
        """File descriptors, in the first and the last minute."""
        return self.ends(lambda held: _sum(held.fds, roles), *roles)

    def _minutes(self, value: Callable[[Holdings], float], roles: Sequence[Role]) -> list[tuple[float, float]]:
        """(minute, median) of the samples that count."""
        by_minute: dict[int, list[float]] = {}
        for sample in self._samples:
            if sample.seconds >= self._warm_up_seconds and (sample.is_whole or roles == ("server",)):
                by_minute.setdefault(int(sample.seconds // 60), []).append(value(sample.held))
        return [(minute, statistics.median(values)) for minute, values in by_minute.items()]

    def _warm_lives(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ages in minutes and sizes in MB of each worker with at least two warm samples."""
        lives: dict[int, list[tuple[float, float]]] = {}
        for sample in self._samples:
            for worker in sample.held.workers if sample.is_whole else ():
                if worker.age >= WORKER_WARM_UP_SECONDS:
                    lives.setdefault(worker.pid, []).append((worker.age / 60, worker.memory / MB))
        columns = (np.array(life).T for life in lives.values() if len(life) > 1)
        return [(ages, sizes) for ages, sizes in columns]


def _slopes(ages: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """MB per minute between all pairs of samples PAIR_SECONDS apart."""
    apart, (least, most) = ages[None] - ages[:, None], PAIR_SECONDS
    is_pair = (apart >= least / 60) & (apart <= most / 60)
    slopes: np.ndarray = (sizes[None] - sizes[:, None])[is_pair] / apart[is_pair]
    return slopes


def _sum(counts: Counter[str], roles: Iterable[Role] = ()) -> float:
    return sum(counts[role] for role in roles) if roles else counts.total()
