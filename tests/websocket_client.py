"""A WebSocket client of a few lines (RFC 6455), for tests of the server."""

from __future__ import annotations

import base64
import os
import socket
import struct
from types import TracebackType
from typing import Self

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


class WebSocketClient:
    """Connects when it is made; answers pings while it reads."""

    def __init__(self, address: tuple[str, int], path: str, headers: str = "", timeout: float = 30.0) -> None:
        """headers: further lines of the request. status: of the answer; 101: it is open. body: of a refusal."""
        self._socket = socket.create_connection(address, timeout=timeout)
        self._file = self._socket.makefile("rb")
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n{headers}\r\n".encode()
        )
        self.status = int(self._file.readline().split()[1])
        lines = list(iter(lambda: self._file.readline().strip().decode().lower(), ""))
        self.headers = dict(line.split(": ", 1) for line in lines)
        self.body = self._file.read(int(self.headers.get("content-length", "0"))) if self.status != 101 else b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def recv(self) -> str | bytes | None:
        """The next message; None: the server has closed the connection."""
        while True:
            opcode, payload = self.frame()
            match opcode:
                case 1:
                    return payload.decode()
                case 2:
                    return payload
                case 8:
                    return None
                case 9:
                    self.send(PONG, payload)

    def frame(self) -> tuple[int, bytes]:
        """(opcode, payload) of the next frame. At the end of the connection: that of an empty close frame."""
        head = self._file.read(2)
        if len(head) < 2:
            return CLOSE, b""
        assert head[0] & 0x80
        assert not head[1] & 0x80
        length = head[1]
        if length > 125:
            length = struct.unpack(">H" if length == 126 else ">Q", self._file.read(2 if length == 126 else 8))[0]
        return head[0] & 0x0F, self._file.read(length)

    def send(self, opcode: int, payload: bytes) -> None:
        self.send_bytes(masked(opcode, payload))

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def masked(opcode: int, payload: bytes, *, first: int = 0x80, mask: bytes = b"\x01\x02\x03\x04") -> bytes:
    """A frame as clients send it. first: the bits beside the opcode."""
    length = len(payload)
    if length <= 125:
        size = struct.pack(">B", 0x80 | length)
    elif length < 2**16:
        size = struct.pack(">BH", 0x80 | 126, length)
    else:
        size = struct.pack(">BQ", 0x80 | 127, length)
    return bytes([first | opcode]) + size + mask + bytes(each ^ mask[at % 4] for at, each in enumerate(payload))
