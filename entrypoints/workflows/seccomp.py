"""Forbids this process to make others, to change how others run, and to make sockets.

A limit on the number of processes (RLIMIT_NPROC) counts all of a user's, does not hold for root, and a process that has
left its group survives the group's end. So the kernel is told to refuse the calls that make a process, by a filter that
stays for good (seccomp, Linux's Documentation/userspace-api/seccomp_filter.rst). Threads may be made, and pairs of
stream sockets, which event loops need: those of datagrams could be connected again, to another process. Limits and
priorities of other processes are not changed: one of processor time ends a process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import NamedTuple

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER_MODE = 22, 38, 2
_LOAD, _IS, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # operations of the filter
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000  # the latter with an errno
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # offsets in struct seccomp_data
_CLONE_THREAD = 0x10000
_ALL = 0xFFFFFFFF
_SOCKET_TYPE, _STREAM = 0xF, 1  # the other bits of a socket's type are flags
_CLONE3 = 435  # its flags are in memory, which a filter cannot read; without it, libraries use clone
_IO_URING_SETUP = 425  # through which sockets could be made without the call of that name
_X32 = 0x40000000  # calls of another ABI have this bit


class _Machine(NamedTuple):
    """Numbers of system calls."""

    audit: int  # how the kernel calls the architecture
    clone: int
    socketpair: int
    of_processes: tuple[int, ...]  # prlimit64, sched_setaffinity, -scheduler, -param, -attr: 0 is the caller itself
    refused: tuple[int, ...]  # fork and vfork, where they are, socket, setpriority and ioprio_set


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 56, 53, (302, 203, 144, 142, 314), (57, 58, 41, 141, 251)),
    "aarch64": _Machine(0xC00000B7, 220, 199, (261, 122, 119, 118, 274), (198, 140, 30)),
}


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def forbid_processes_and_sockets() -> None:
    """From here on, fork, socket, what is built on them, and changes of other processes raise PermissionError. Raises
    OSError if the kernel has no such filter.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise OSError(errno.ENOSYS, f"no filter of system calls is known for {platform.machine()}")
    code = b"".join(_filter(machine))
    instructions = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(instructions, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0
    ):
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel takes no filter of system calls: {os.strerror(number)}")


def _filter(machine: _Machine) -> list[bytes]:
    refuse = _instruction(_RETURN, _REFUSE | errno.EPERM)
    numbers = (*machine.refused, _IO_URING_SETUP)
    refused = [part for number in numbers for part in (_instruction(_IS, number, 0, 1), refuse)]
    return [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_IS, machine.audit, 1, 0),
        refuse,
        _instruction(_LOAD, _NUMBER),
        _instruction(_AT_LEAST, _X32, 0, 1),
        refuse,
        _instruction(_IS, _CLONE3, 0, 1),
        _instruction(_RETURN, _REFUSE | errno.ENOSYS),
        *refused,
        *_allowed_if(machine.socketpair, _SECOND_ARGUMENT, _SOCKET_TYPE, _STREAM),
        *(part for number in machine.of_processes for part in _allowed_if(number, _FIRST_ARGUMENT, _ALL, 0)),
        *_allowed_if(machine.clone, _FIRST_ARGUMENT, _CLONE_THREAD, _CLONE_THREAD),
        _instruction(_RETURN, _ALLOW),
    ]


def _allowed_if(number: int, argument: int, mask: int, value: int) -> list[bytes]:
    """Ends the filter for this call: it is allowed if these bits of an argument, at an offset, have this value."""
    return [
        _instruction(_IS, number, 0, 5),
        _instruction(_LOAD, argument),
        _instruction(_AND, mask),
        _instruction(_IS, value, 0, 1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _REFUSE | errno.EPERM),
    ]


def _instruction(operation: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """struct sock_filter. if_true, if_false: how many instructions a test skips."""
    return struct.pack("=HBBI", operation, if_true, if_false, operand)
