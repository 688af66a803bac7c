"""Sockets between processes of one user: who is let in."""

from __future__ import annotations

import os
import socket
import struct
from typing import cast

import pytest

from core.ipc.local_sockets import is_own


class Connection:
    """A socket whose other end is a process of this user."""

    def __init__(self, uid: int) -> None:
        self._uid = uid

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("=iII", 1, self._uid, self._uid)[:size]  # struct ucred of unix(7)


@pytest.mark.parametrize("own", [0, 1000, 3_000_000_000])
@pytest.mark.parametrize("other", [0, 1000, 3_000_000_000])
def test_only_processes_of_the_same_user_are_let_in(own: int, other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory service gives users numbers beyond 2**31, too."""
    monkeypatch.setattr(os, "geteuid", lambda: own)
    assert is_own(cast(socket.socket, Connection(other))) == (own == other)
