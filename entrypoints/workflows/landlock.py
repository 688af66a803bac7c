"""Confines this process to a folder: all else it can only read, and it reaches no other process.

The kernel keeps these rules for good (Landlock, Linux's Documentation/userspace-api/landlock.rst): no file is written,
made, moved or removed outside of the folder, no other process gets a signal or a connection, and none can be looked
into: /proc/PID/environ may have keys. What it may not do raises PermissionError. Modes, owners and times of files can
still be changed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, on all architectures
_ASK_VERSION, _PATH_BENEATH = 1, 1
_PR_SET_NO_NEW_PRIVS = 38
_READ = 1 << 2
_WRITE, _REMOVE_DIR, _REMOVE_FILE, _MAKE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 4, 1 << 5, 1 << 8, 1 << 13, 1 << 14
_MAKE_OTHERS = sum(1 << bit for bit in (6, 7, 9, 10, 11, 12))  # devices, folders, sockets, pipes, links
# Version of the interface -> what it adds.
_FILES = {1: _READ | _WRITE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_FILE | _MAKE_OTHERS, 2: _REFER, 3: _TRUNCATE}
_NETWORK = {4: 0b11}  # bind and connect, TCP
_SCOPES = {6: 0b11}  # abstract Unix sockets, and signals, of other processes
_SIZES = {1: 8, 4: 16, 6: 24}  # of struct landlock_ruleset_attr


def confine_to(folder: str) -> None:
    """From here on, write only to files right in this folder, and read none of other processes. Nothing happens where
    the kernel has no Landlock. Raises OSError.
    """
    try:
        version = _call(_CREATE, None, 0, _ASK_VERSION)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):  # the last, if a container forbids to ask
            return
        raise
    handled = _known(_FILES, version)
    rules = struct.pack("=QQQ", handled, _known(_NETWORK, version), _known(_SCOPES, version))
    ruleset = _call(_CREATE, rules, max(size for first, size in _SIZES.items() if first <= version), 0)
    try:
        for place in _readable():
            _allow(ruleset, place, _READ)
        _allow(ruleset, folder, _READ | handled & (_WRITE | _TRUNCATE | _MAKE_FILE | _REMOVE_FILE))
        _allow(ruleset, os.devnull, _READ | handled & (_WRITE | _TRUNCATE))
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call(_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _readable() -> Iterator[str]:
    """All places but the folders of other processes."""
    yield from (f"/{name}" for name in os.listdir("/") if name != "proc")
    yield from (f"/proc/{name}" for name in os.listdir("/proc") if not name.isdigit() or int(name) == os.getpid())


def _known(added: Mapping[int, int], version: int) -> int:
    """The bits that a version of the interface knows."""
    return sum(bits for first, bits in added.items() if first <= version)


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Allow these rights below a path; nothing there, if it is gone or the kernel takes no rule for it."""
    with suppress(OSError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            _call(_ADD, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
        finally:
            os.close(place)


def _call(number: int, *arguments: int | bytes | None) -> int:
    """A system call. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    passed = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    result: int = libc.syscall(ctypes.c_long(number), *passed)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return result
