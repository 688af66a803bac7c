"""The processes of a server, what they hold of the machine over time, and by how much that grows."""

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

Role = Literal["server", "engine", "worker", "images"]
ROLES: tuple[Role, ...] = get_args(Role)
MB = 1e6

WORKER_WARM_UP_SECONDS = 120.0
"""From a worker's start: it loads for some part of that, and then keeps compiled operators of the shapes that it meets,
until there is no more room for them (model_executor/worker/worker.py)."""
PAIR_SECONDS = 20.0, 60.0  # how far two samples of a worker are apart, at least and at most, that make a slope

_NAME = re.compile(r"stencil-(engine|worker|images)(?:-(\d+))?")


@dataclass(frozen=True)
class Member:
    """One process. rank: of its engine; 0 for others."""

    role: Role
    rank: int
    process: psutil.Process


class Tree:
    """All processes below the server `pid`, itself included."""

    def __init__(self, pid: int) -> None:
        self._server = psutil.Process(pid)

    def members(self) -> list[Member]:
        """Those that live now."""
        return [Member("server", 0, self._server), *self._below(self._server, 0)]

    def of(self, role: Role, rank: int | None = None) -> list[Member]:
        """Those of a role, of one engine or of all."""
        return [m for m in self.members() if m.role == role and rank in (None, m.rank)]

    def _below(self, parent: psutil.Process, rank: int) -> Iterator[Member]:
        for child in _children(parent):
            match = _name(child)
            if match is None:
                continue
            role, number = cast(Role, match[1]), match[2]
            below = int(number) if role == "engine" else rank
            yield Member(role, below, child)
            if role == "engine":
                yield from self._below(child, below)


def _children(parent: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return list(parent.children())
    return []


def _name(process: psutil.Process) -> re.Match[str] | None:
    """Its name as the server gave it, which is a word of its command line."""
    with suppress(psutil.Error):
        return next(filter(None, map(_NAME.fullmatch, process.cmdline())), None)
    return None


def processes_of(scratch: Path) -> list[psutil.Process]:
    """Every process of this machine whose temporary folder is `scratch`, orphans included."""
    mark = f"TMPDIR={scratch}".encode()
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
    """What one worker holds. age: seconds since its process began. memory: bytes."""

    pid: int
    age: float
    memory: int


@dataclass(frozen=True)
class Holdings:
    """What a tree holds, by role. memory: bytes, without what is mapped of files; what n processes share counts 1/n in
    each.
    """

    memory: Counter[str] = field(default_factory=Counter)
    fds: Counter[str] = field(default_factory=Counter)
    workers: list[WorkerMemory] = field(default_factory=list)


def holdings(tree: Tree) -> Holdings:
    """Now; a process that ends meanwhile is left out."""
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
    """seconds: since the start of the traffic. is_whole: all engines served."""

    seconds: float
    held: Holdings
    is_whole: bool


class Samples:
    """What counts comes after the warm-up and, but for the API server's own, was taken while all engines served: one
    that is being started holds less.

    Deaths make the workers' memory a saw, which begins again with every restart and hides what a worker leaks: a soak
    without deaths shows that, and `worker_growth`.
    """

    def __init__(self, warm_up_seconds: float) -> None:
        self._warm_up_seconds = warm_up_seconds
        self._samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def memory_slope(self, *roles: Role) -> float:
        """MB per minute: least squares over the minutes' medians; of some roles together, or of all. NaN when there are
        fewer than three."""
        minutes = self._minutes(lambda held: _sum(held.memory, roles) / MB, roles)
        if len(minutes) < 3:
            return float("nan")
        times, values = np.array(minutes).T
        return float(np.polyfit(times, values, deg=1)[0])

    def worker_growth(self) -> float:
        """MB per minute that a worker grows by once it is warm: the median of the slopes between two samples of one
        life, over all pairs (Theil and Sen's estimate, of near samples alone). A jump to a new maximum of its heap,
        which comes once with the largest batch so far, is not in it. NaN where no life was seen for so long.
        """
        slopes = [_slopes(*life) for life in self._warm_lives()]
        every = np.concatenate(slopes) if slopes else np.empty(0)
        return float(np.median(every)) if len(every) else float("nan")

    def warm_worker(self) -> float:
        """MB of a warm worker, the median; NaN where none was seen."""
        sizes = [size for _, sizes in self._warm_lives() for size in sizes]
        return statistics.median(sizes) if sizes else float("nan")

    def num_worker_lives(self) -> int:
        """Those that `worker_growth` was taken from."""
        return len(self._warm_lives())

    def ends(self, value: Callable[[Holdings], float], *roles: Role) -> tuple[float, float]:
        """Of the first and of the last minute; NaN without samples."""
        minutes: Sequence[tuple[float, float]] = self._minutes(value, roles) or [(0.0, float("nan"))]
        return minutes[0][1], minutes[-1][1]

    def memory(self, *roles: Role) -> tuple[float, float]:
        """MB, likewise."""
        return self.ends(lambda held: _sum(held.memory, roles) / MB, *roles)

    def fds(self, *roles: Role) -> tuple[float, float]:
        """File descriptors, likewise."""
        return self.ends(lambda held: _sum(held.fds, roles), *roles)

    def _minutes(self, value: Callable[[Holdings], float], roles: Sequence[Role]) -> list[tuple[float, float]]:
        """(minute, median) of those that count."""
        by_minute: dict[int, list[float]] = {}
        for sample in self._samples:
            if sample.seconds >= self._warm_up_seconds and (sample.is_whole or roles == ("server",)):
                by_minute.setdefault(int(sample.seconds // 60), []).append(value(sample.held))
        return [(minute, statistics.median(values)) for minute, values in by_minute.items()]

    def _warm_lives(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ages in minutes and sizes in MB of each worker that was seen more than once when it was warm."""
        lives: dict[int, list[tuple[float, float]]] = {}
        for sample in self._samples:
            for worker in sample.held.workers if sample.is_whole else ():
                if worker.age >= WORKER_WARM_UP_SECONDS:
                    lives.setdefault(worker.pid, []).append((worker.age / 60, worker.memory / MB))
        columns = (np.array(life).T for life in lives.values() if len(life) > 1)
        return [(ages, sizes) for ages, sizes in columns]


def _slopes(ages: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """MB per minute between any two samples as far apart as they should be."""
    apart, (least, most) = ages[None] - ages[:, None], PAIR_SECONDS
    is_pair = (apart >= least / 60) & (apart <= most / 60)
    slopes: np.ndarray = (sizes[None] - sizes[:, None])[is_pair] / apart[is_pair]
    return slopes


def _sum(counts: Counter[str], roles: Iterable[Role] = ()) -> float:
    return sum(counts[role] for role in roles) if roles else counts.total()
