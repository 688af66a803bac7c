"""Checks the process limits of the shell (setrlimit) against the needs of Stencil's processes, before any is started,
and reads how much memory there is.

A process that hits a limit later fails at an arbitrary point: while it imports, maps memory or writes a file.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from core.errors import ConfigError

LIBRARY_BYTES = 2 * 1024**3
"""Address space of a worker beside its arenas: 1.4 GiB with the embedded model on a CPU."""

CGROUP_MEMBERSHIP, CGROUP_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


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
    """Bytes of memory that all processes here may take together: the machine's, or what its control groups allow."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError):
        limits.extend(cgroup_limits(CGROUP_MEMBERSHIP.read_text(), CGROUP_ROOT))
    return min(limits)


def cgroup_limits(membership: str, root: Path) -> Iterator[int]:
    """Bytes of memory that this process's control groups allow, from its own group up to the root; groups without a
    limit are left out. membership: the lines of /proc/self/cgroup, see cgroups(7). root: where the groups are mounted.
    A container may see its own group as the root, under a path that does not exist there.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        own = PurePosixPath(path.lstrip("/"))
        mounted, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        for group in (own, *own.parents):
            with suppress(OSError, ValueError):  # ValueError: "max", no limit
                yield int((mounted / group / name).read_text())


def _limit(name: int) -> float:
    soft, _ = resource.getrlimit(name)
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def _gib(nbytes: float) -> str:
    return f"{nbytes / 1024**3:.3g} GiB"
