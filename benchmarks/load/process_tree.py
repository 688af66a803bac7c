"""Memory and processor time of a process and all its descendants, from /proc."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil


def processes(root: int) -> list[psutil.Process]:
    """The process `root` and everything below it."""
    parent = psutil.Process(root)
    return [parent, *parent.children(recursive=True)]


def pss_bytes(root: int) -> int:
    """Memory of the tree; pages shared by n processes count 1/n in each (Linux's proportional set size)."""
    return sum(pss_of(process.pid) for process in processes(root))


def cpu_seconds(root: int) -> float:
    """User and system time of the tree's living processes so far."""
    total = 0.0
    for process in processes(root):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def cpu_by_name(root: int) -> dict[str, float]:
    """User and system time of the tree's living processes so far, by their names."""
    found = defaultdict[str, float](float)
    for process in processes(root):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process.name()] += times.user + times.system
    return found


def cpu_share(root: int, seconds: float) -> float:
    """Share of one core that the tree uses during the next `seconds`."""
    start, used = time.monotonic(), cpu_seconds(root)
    time.sleep(seconds)
    return (cpu_seconds(root) - used) / (time.monotonic() - start)


def pss_of(pid: int) -> int:
    """Proportional set size of one process, in bytes. Raises OSError or ValueError when it is gone."""
    return _rollup(pid)["Pss"]


def own_bytes_of(pid: int) -> int:
    """Its own memory and its share of shared memory, without mapped files such as libraries, whose share changes with
    all processes of the machine. Raises OSError or ValueError when it is gone.
    """
    sizes = _rollup(pid)
    return sizes["Pss_Anon"] + sizes["Pss_Shmem"]


def _rollup(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]  # the first one is a range of addresses
    if not lines:
        raise ValueError(f"/proc/{pid}/smaps_rollup is empty")
    return {name: int(size.split()[0]) * 1024 for name, size in (line.split(":") for line in lines)}
