"""A JSON body with pictures in it, read as it streams in.

A parser would hold the interpreter for a tenth of a second over a body of 100 MB. So strings beyond 512 KiB, which only
pictures have, are taken out before anything is parsed: each becomes an upload of its own, with a marker in its place.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid

from entrypoints.openai.uploads import SpooledUpload

LONG_STRING_BYTES = 512 * 1024
"""More than any valid text field: 32000 characters are at most 12 bytes each, as escaped surrogate pairs."""
PIECE_BYTES = 64 * 1024
"""Read between two turns of the event loop, 1 ms at worst. At most LONG_STRING_BYTES: a string that begins and ends
within a piece is never long, so only a piece's first and last quotes are looked at."""
_CUT_ESCAPE = re.compile(rb"\\(u[0-9a-fA-F]{0,3})?\Z")
_LONGEST_CUT_ESCAPE = 5


class JsonBody:
    """feed all chunks, then read `text`: the document without its long strings, and `long_strings` by their markers."""

    def __init__(self) -> None:
        self.text = bytearray()
        self.long_strings: dict[str, SpooledUpload] = {}
        self._marker = f"long-string-{uuid.uuid4().hex}"  # nobody can guess it
        self._is_in_string = False
        self._content: list[bytearray] = []  # of the current string until it is long, in pieces that cut no escape
        self._upload: SpooledUpload | None = None  # of the current string, once it is long
        self._rest = b""  # an escape that the piece's end cut

    def close(self) -> None:
        """Free the uploads."""
        for upload in self.long_strings.values():
            upload.close()

    async def feed(self, chunk: bytes) -> None:
        for start in range(0, len(chunk), PIECE_BYTES):
            await self._feed_piece(self._rest + chunk[start : start + PIECE_BYTES])
            await asyncio.sleep(0)  # an upload in memory never waits

    async def _feed_piece(self, data: bytes) -> None:
        # In `plain` every quote begins or ends a string. A backslash between strings may spoil that, but stays in
        # `text`, where the parser will not read beyond it.
        plain = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        starts_in_string, num_quotes = self._is_in_string, plain.count(b'"')
        self._is_in_string = starts_in_string != bool(num_quotes % 2)
        end = _uncut(plain) if self._is_in_string else len(plain)
        self._rest = data[end:]
        first, last = plain.find(b'"'), plain.rfind(b'"')
        if num_quotes == 0:
            await self._take(data[:end], starts_in_string)
            return
        await self._take(data[:first], starts_in_string)
        if starts_in_string:
            self._end_string()
        between = last + 1 if self._is_in_string else end
        self.text += data[first:between]
        await self._take(data[between:end], self._is_in_string)

    async def _take(self, data: bytes, is_content: bool) -> None:
        if not is_content:
            self.text += data
        elif self._upload is not None:
            await self._spool(self._upload, data)
        else:
            self._keep(data)
            if sum(map(len, self._content)) > LONG_STRING_BYTES:
                await self._take_out()

    def _keep(self, data: bytes | bytearray) -> None:
        if self._content and len(self._content[-1]) + len(data) <= PIECE_BYTES:
            self._content[-1] += data
        else:
            self._content.append(bytearray(data))

    async def _take_out(self) -> None:
        """The current string turns out to be long."""
        marker = f"{self._marker}-{len(self.long_strings)}"
        self._upload = self.long_strings[marker] = SpooledUpload()
        pieces, self._content = self._content, [bytearray(marker.encode())]
        for piece in pieces:
            await self._spool(self._upload, piece)
            await asyncio.sleep(0)

    async def _spool(self, upload: SpooledUpload, content: bytes | bytearray) -> None:
        try:
            await upload.write(_unescape(content))
        except ValueError:  # no escape at all
            self._keep(content)  # the parser will say so

    def _end_string(self) -> None:
        self.text += b"".join(self._content)
        self._content, self._upload = [], None


def _uncut(plain: bytes) -> int:
    """The length without an escape at the end that may go on in the next piece."""
    match = _CUT_ESCAPE.search(plain, max(0, len(plain) - _LONGEST_CUT_ESCAPE))
    return match.start() if match else len(plain)


def _unescape(content: bytes | bytearray) -> bytes | bytearray:
    """Resolves escapes; what is not ASCII comes out as something that is no base64 either. Raises ValueError."""
    if b"\\" not in content:
        return content
    text: str = json.loads(b'"%s"' % content if content.isascii() else f'"{content.decode("latin-1")}"', strict=False)
    return text.encode("ascii", "replace")
