"""What a process and all its descendants take of the machine, read from /proc."""

from __future__ import annotations

import time
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


def cpu_share(root: int, seconds: float) -> float:
    """Share of one core that the tree uses during the next `seconds`."""
    start, used = time.monotonic(), cpu_seconds(root)
    time.sleep(seconds)
    return (cpu_seconds(root) - used) / (time.monotonic() - start)


def pss_of(pid: int) -> int:
    """Proportional set size of one process, in bytes. Raises OSError or ValueError when it is gone."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/smaps_rollup has no Pss line")
