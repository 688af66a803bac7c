"""Stores uploads while they arrive: in memory up to 1 MiB, beyond that in an unlinked temporary file.

If the disk fails, NoDiskError refuses the request with 503, so that clients try again later.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import IO, Protocol

from core.errors import InvalidRequestError
from engine.client.upload import Upload
from entrypoints.openai.answer.errors import NoDiskError, RequestTooLargeError

PIECE_BYTES = 256 * 1024
MEMORY_BYTES = 1024 * 1024
_DATA_URL_HEAD_BYTES = 256
_WHITESPACE = b" \t\r\n"


_log = logging.getLogger("stencil.api")


class StoredUpload(Upload, Protocol):
    """A file that is stored for a request."""

    def close(self) -> None:
        """Free what it alone takes."""


class SpooledUpload:
    """A received file. Disk access happens in threads, so that the event loop never waits for it.

    All methods that access the disk raise NoDiskError if it fails.
    """

    def __init__(self) -> None:
        self._memory = bytearray()  # the content, until there is a file
        self._file: IO[bytes] | None = None  # unbuffered, so that closing it writes nothing
        self._unwritten = bytearray()  # collects a socket's small chunks, to use a thread less often
        self._lock = threading.Lock()  # a thread may still use the file after its caller was cancelled
        self._is_closed = False
        self.size = 0  # bytes

    async def write(self, data: bytes | bytearray) -> None:
        """Append `data`."""
        self.size += len(data)
        self._unwritten += data
        if len(self._unwritten) >= PIECE_BYTES:
            await self._flush()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The content in pieces of at most 256 KiB; may be read several times."""
        await self._flush()
        for offset in range(0, self.size, PIECE_BYTES):
            if self._file is None:
                yield bytes(self._memory[offset : offset + PIECE_BYTES])
            else:
                yield await asyncio.to_thread(self._read, offset)

    async def read(self) -> bytes:
        """The whole content; for small fields."""
        return b"".join([chunk async for chunk in self.chunks()])

    def close(self) -> None:
        """Free memory and disk; the disk in a thread, as freeing a file of 50 MB takes 10 ms."""
        if self.size > MEMORY_BYTES:
            asyncio.get_running_loop().run_in_executor(None, self._close)
        else:
            self._memory = bytearray()

    async def _flush(self) -> None:
        data, self._unwritten = self._unwritten, bytearray()
        if self.size <= MEMORY_BYTES:
            self._memory += data
        elif data:
            await asyncio.to_thread(self._write, data)

    def _write(self, data: bytearray) -> None:
        """Append to the file; the first call creates it and moves the content in memory there."""
        with self._lock, _disk_faults():
            if self._is_closed:
                return
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by close()
                data, self._memory = self._memory + data, bytearray()
            _write_all(self._file, data)

    def _read(self, offset: int) -> bytes:
        with self._lock, _disk_faults():
            assert self._file is not None
            return b"" if self._is_closed else os.pread(self._file.fileno(), PIECE_BYTES, offset)

    def _close(self) -> None:
        with self._lock:
            self._is_closed, self._memory = True, bytearray()
            if self._file is not None:
                self._file.close()


def _write_all(file: IO[bytes], data: bytearray) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]  # a short write means the disk is nearly full; the next one raises


@contextmanager
def _disk_faults() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _log.warning("an upload cannot be kept in the temporary folder (TMPDIR): %s", error.strerror)
        raise NoDiskError from error


def pieces_of(data: bytes | memoryview) -> Iterator[bytes]:
    """`data` in pieces of at most 256 KiB."""
    for offset in range(0, len(data), PIECE_BYTES):
        yield bytes(data[offset : offset + PIECE_BYTES])


async def decode_base64(
    pieces: AsyncIterator[bytes], param: str, max_bytes: int, *, needs_data_url: bool = False
) -> SpooledUpload:
    """Decode base64 text, plain or as a ``data:`` URL, piece by piece; line breaks are allowed.

    Raises InvalidRequestError for text that is not base64, and for plain base64 if `needs_data_url`;
    RequestTooLargeError as soon as the decoded data exceeds `max_bytes`.
    """
    upload = SpooledUpload()
    decoder = _Base64Decoder(param, needs_data_url)
    try:
        async for piece in pieces:
            await upload.write(decoder.feed(piece))
            if upload.size > max_bytes:
                break
        else:
            await upload.write(decoder.finish())
        if upload.size > max_bytes:
            raise file_too_large(param, max_bytes)
    except BaseException:
        upload.close()
        raise
    return upload


def file_too_large(param: str, max_bytes: int) -> RequestTooLargeError:
    """The error for a file or field that exceeds `max_bytes`."""
    return RequestTooLargeError(f"Invalid '{param}': larger than the maximum of {max_bytes} bytes.", param=param)


class _Base64Decoder:
    """Decodes base64 incrementally; keeps the characters beyond a multiple of four for the next call."""

    def __init__(self, param: str, needs_data_url: bool) -> None:
        self._param = param
        self._needs_data_url = needs_data_url
        self._rest = b""
        self._started = False
        self._padded = False

    def feed(self, text: bytes) -> bytes:
        text = self._rest + text.translate(None, _WHITESPACE)
        if not self._started:
            if len(text) < _DATA_URL_HEAD_BYTES:
                self._rest = text
                return b""
            text = self._without_head(text)
        usable = len(text) - len(text) % 4
        self._rest = text[usable:]
        return self._decode(text[:usable])

    def finish(self) -> bytes:
        text = self._rest if self._started else self._without_head(self._rest)
        return self._decode(text)

    def _without_head(self, text: bytes) -> bytes:
        self._started = True
        if text[:5].lower() != b"data:":
            if self._needs_data_url:
                remedy = "send the picture itself, as a data: URL or as a file of a multipart form"
                raise self._error(f"URLs are not fetched; {remedy}", "unsupported_value")
            return text
        head, comma, body = text.partition(b",")
        if not comma or not head.lower().endswith(b";base64"):
            raise self._error("expected a data: URL of the form 'data:image/png;base64,...'")
        return body

    def _decode(self, text: bytes) -> bytes:
        if text and self._padded:
            raise self._error("not valid base64")
        self._padded = text.endswith(b"=")
        try:
            return binascii.a2b_base64(text, strict_mode=True)
        except binascii.Error as error:
            raise self._error("not valid base64") from error

    def _error(self, what: str, code: str = "invalid_value") -> InvalidRequestError:
        return InvalidRequestError(f"Invalid '{self._param}': {what}.", param=self._param, code=code)
