"""Checks the process limits of the shell (setrlimit) against the needs of Stencil's processes, before any is started,
and reads how much memory there is.

A process that hits a limit later fails at an arbitrary point: while it imports, maps memory or writes a file.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

from core.errors import ConfigError

LIBRARY_BYTES = 2 * 1024**3
"""Address space of a worker beside its arenas: 1.4 GiB with the embedded model on a CPU."""

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of a container, where it sees its own control group as the root: version 2, version 1."""


def check_limits(arena_bytes: int, page_arena_bytes: int) -> None:
    """Raise ConfigError with the limit and the remedy if the arenas cannot be created or mapped."""
    largest, mapped = max(arena_bytes, page_arena_bytes), arena_bytes + page_arena_bytes
    if _limit(resource.RLIMIT_FSIZE) < largest:
        raise ConfigError(
            f"a file may have {_gib(_limit(resource.RLIMIT_FSIZE))} here, and shared memory of {_gib(largest)} counts "
            "as one; raise the limit by `ulimit -f unlimited`"
        )
    if _limit(resource.RLIMIT_AS) < mapped + LIBRARY_BYTES:
        raise ConfigError(
            f"a process may have {_gib(_limit(resource.RLIMIT_AS))} of address space here, and a worker maps "
            f"{_gib(mapped)} of shared memory (most of it never taken) besides PyTorch and the model; raise the limit "
            "by `ulimit -v unlimited`, and limit memory by a cgroup instead"
        )


def memory_limit() -> int:
    """Bytes of memory that all processes here may take together: the machine's, or what its control group allows."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # ValueError: "max", no limit
            limits.append(int(file.read_text()))
    return min(limits)


def _limit(name: int) -> float:
    soft, _ = resource.getrlimit(name)
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def _gib(nbytes: float) -> str:
    return f"{nbytes / 1024**3:.3g} GiB"
