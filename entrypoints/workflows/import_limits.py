"""ImportLimits: what a user's file may take while it is imported for its workflows."""

from __future__ import annotations

import resource

import msgspec

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_DESCRIPTORS = 256
MAX_MAPPED_BYTES = 16 * 1024**3
"""Most address space: PyTorch's libraries for GPUs map much that they never touch."""


class ImportLimits(msgspec.Struct, frozen=True):
    """By default enough for a file that imports PyTorch and diffusers on a busy machine."""

    seconds: float = 60.0
    cpu_seconds: int = 30
    memory_bytes: int = 4 * 1024**3  # that is written to

    def apply(self) -> None:
        """Set those of this process that the kernel keeps. They cannot be raised again."""
        for kind, limit, most in (
            (resource.RLIMIT_CPU, self.cpu_seconds, self.cpu_seconds + 1),  # SIGXCPU, which tells why; SIGKILL
            (resource.RLIMIT_DATA, self.memory_bytes, self.memory_bytes),
            (resource.RLIMIT_AS, MAX_MAPPED_BYTES, MAX_MAPPED_BYTES),
            (resource.RLIMIT_FSIZE, MAX_FILE_BYTES, MAX_FILE_BYTES),
            (resource.RLIMIT_NOFILE, MAX_DESCRIPTORS, MAX_DESCRIPTORS),
            (resource.RLIMIT_CORE, 0, 0),
        ):
            hard = resource.getrlimit(kind)[1]
            known = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (min(limit, known), known))
