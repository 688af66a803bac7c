"""Encoded files on their way in: held in memory up to 1 MiB, in an unlinked temporary file beyond."""

from __future__ import annotations

import asyncio
import binascii
import tempfile
from collections.abc import AsyncIterator, Iterator

from core.errors import InvalidRequestError
from entrypoints.openai.errors import RequestTooLargeError

PIECE_BYTES = 256 * 1024
MEMORY_BYTES = 1024 * 1024
_DATA_URL_HEAD_BYTES = 256
_WHITESPACE = b" \t\r\n"


class SpooledUpload:
    """A file that was received. Disk is touched in threads only, so the event loop never waits for it."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115 - closed by close()
        self._unwritten = bytearray()  # saves a thread's turn for each of a socket's small chunks
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
            yield await asyncio.to_thread(self._read, offset) if self._is_on_disk else self._read(offset)

    async def read(self) -> bytes:
        """The whole content; for small fields."""
        return b"".join([chunk async for chunk in self.chunks()])

    def close(self) -> None:
        """Free memory and disk; the latter in a thread, as dropping 50 MB of pages takes 10 ms."""
        if self._is_on_disk:
            asyncio.get_running_loop().run_in_executor(None, self._file.close)
        else:
            self._file.close()

    @property
    def _is_on_disk(self) -> bool:
        return self.size > MEMORY_BYTES

    async def _flush(self) -> None:
        data, self._unwritten = self._unwritten, bytearray()
        if self._is_on_disk:
            await asyncio.to_thread(self._file.write, data)
        else:
            self._file.write(data)

    def _read(self, offset: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(PIECE_BYTES)


def pieces_of(data: bytes | memoryview) -> Iterator[bytes]:
    """`data` in pieces of at most 256 KiB."""
    for offset in range(0, len(data), PIECE_BYTES):
        yield bytes(data[offset : offset + PIECE_BYTES])


async def decode_base64(
    pieces: AsyncIterator[bytes], param: str, max_bytes: int, *, needs_data_url: bool = False
) -> SpooledUpload:
    """Decode base64 text, plain or as a ``data:`` URL, piece by piece; line breaks are allowed.

    Raises InvalidRequestError for text that is not base64, and for a plain one if `needs_data_url`;
    RequestTooLargeError as soon as more than `max_bytes` come out.
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
    """The refusal of one file or field of a body."""
    return RequestTooLargeError(f"Invalid '{param}': larger than the maximum of {max_bytes} bytes.", param=param)


class _Base64Decoder:
    """Incremental: keeps what is not yet a multiple of four characters."""

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
                raise self._error("expected a data: URL; other URLs are not fetched", "unsupported_value")
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
