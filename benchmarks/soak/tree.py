"""The processes of a server, by what they do, and all that it holds of the machine."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import psutil

from benchmarks.load.process_tree import own_bytes_of

Role = Literal["server", "engine", "worker", "images"]

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

    memory: Counter[str]
    fds: Counter[str]
    threads: Counter[str]
    processes: Counter[str]
    workers: list[WorkerMemory] = field(default_factory=list)


def holdings(tree: Tree) -> Holdings:
    """Now; a process that ends meanwhile is left out."""
    held = Holdings(Counter(), Counter(), Counter(), Counter())
    for member in tree.members():
        with suppress(psutil.Error, OSError, ValueError):
            memory = own_bytes_of(member.process.pid)
            held.fds[member.role] += member.process.num_fds()
            held.threads[member.role] += member.process.num_threads()
            held.processes[member.role] += 1
            held.memory[member.role] += memory
            if member.role == "worker":
                age = time.time() - member.process.create_time()
                held.workers.append(WorkerMemory(member.process.pid, age, memory))
    return held


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


def _children(parent: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return list(parent.children())
    return []


def _name(process: psutil.Process) -> re.Match[str] | None:
    """Its name as the server gave it, which is a word of its command line."""
    with suppress(psutil.Error):
        for word in process.cmdline():
            if match := _NAME.fullmatch(word):
                return match
    return None
