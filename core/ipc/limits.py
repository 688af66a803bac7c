"""Checks the process limits of the shell (setrlimit) against the needs of Stencil's processes, before any is started.

A process that hits a limit later fails at an arbitrary point: while it imports, maps memory or writes a file.
"""

from __future__ import annotations

import resource

from core.errors import ConfigError

LIBRARY_BYTES = 2 * 1024**3
"""Address space of a worker beside its arenas: 1.4 GiB with the embedded model on a CPU."""


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


def _limit(name: int) -> float:
    soft, _ = resource.getrlimit(name)
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def _gib(nbytes: float) -> str:
    return f"{nbytes / 1024**3:.3g} GiB"
