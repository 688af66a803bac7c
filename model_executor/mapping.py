"""Mapping: memory of a memfd, or of this process alone, mapped and unmapped without the interpreter's lock.

Python's `mmap` holds the lock while the kernel works: 10 ms for the end of a mapping of 500 MB, in which no thread
computes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

_FAILED = ctypes.c_void_p(-1).value


def map_private(fd: int, nbytes: int) -> Any:
    """The first bytes of a file as a buffer of ctypes, to which weak references can be made. What this process writes
    to it is its own. The mapping ends with the last object that refers to it. Raises OSError."""
    return _mapped(nbytes, mmap.MAP_PRIVATE, fd)


def map_own(nbytes: int) -> Any:
    """Memory of this process alone, in pages of its own, as a buffer like that of `map_private`. Raises OSError."""
    return _mapped(nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)


def _mapped(nbytes: int, flags: int, fd: int) -> Any:
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(buffer, _libc.munmap, address, nbytes).atexit = False
    return buffer
