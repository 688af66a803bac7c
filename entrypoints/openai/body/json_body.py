"""Reads a JSON body that contains pictures while it arrives.

Parsing a body of 100 MB at once would block the event loop for a tenth of a second. So strings above 512 KiB, which
only pictures and texts of workflows reach, are removed before parsing: each becomes an upload of its own, and a marker
takes its place.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid

from core.errors import InvalidRequestError
from entrypoints.openai.body.uploads import SpooledUpload

LONG_STRING_BYTES = 512 * 1024
"""More than any text field of the API itself needs: 32000 characters of at most 12 bytes each, as escaped surrogate
pairs."""
PIECE_BYTES = 64 * 1024
"""Processed between two turns of the event loop; takes 1 ms at worst. Must be at most LONG_STRING_BYTES: then a string
within one piece is never long, and only the first and last quote of a piece matter."""
_CUT = re.compile(
    rb"((\\u[dD][89abAB][0-9a-fA-F]{2})?(\\(u[0-9a-fA-F]{0,3})?)?"
    rb"|[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2})\Z"
)
"""What may be incomplete at the end of a piece: an escape and the second half of a surrogate pair, or a character of
UTF-8. Matches nothing, too."""
_LONGEST_CUT = 11


class JsonBody:
    """Splits a document into `text` and `long_strings`; call `feed` with all chunks first."""

    def __init__(self) -> None:
        self.text = bytearray()  # the document, with markers instead of long strings
        self.string_bytes = 0  # of `text`, in strings that reach from one piece into the next: in all of some size
        self.long_strings: dict[str, SpooledUpload] = {}  # marker -> the string's content, in UTF-8
        self._marker = f"long-string-{uuid.uuid4().hex}"  # random, so that a client cannot send it
        self._is_in_string = False
        self._content: list[
            bytearray
        ] = []  # of the current string until it is long; pieces never split an escape or a character
        self._upload: SpooledUpload | None = None  # of the current string, once it is long
        self._rest = b""  # what is incomplete at the end of the last piece

    def close(self) -> None:
        """Free the uploads."""
        for upload in self.long_strings.values():
            upload.close()

    async def feed(self, chunk: bytes) -> None:
        for start in range(0, len(chunk), PIECE_BYTES):
            await self._feed_piece(self._rest + chunk[start : start + PIECE_BYTES])
            await asyncio.sleep(0)  # SpooledUpload.write does not yield while it is in memory

    async def _feed_piece(self, data: bytes) -> None:
        # In `plain` every quote begins or ends a string. A stray backslash between strings breaks that, but is kept in
        # `text`, where the parser fails on it.
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
        """Move the current string, which has become long, to an upload."""
        marker = f"{self._marker}-{len(self.long_strings)}"
        self._upload = self.long_strings[marker] = SpooledUpload()
        pieces, self._content = self._content, [bytearray(marker.encode())]
        for piece in pieces:
            await self._spool(self._upload, piece)
            await asyncio.sleep(0)

    async def _spool(self, upload: SpooledUpload, content: bytes | bytearray) -> None:
        try:
            plain = _unescape(content)
        except ValueError as error:
            raise InvalidRequestError(f"Could not parse the JSON body: {error}.", code="invalid_json") from error
        await upload.write(plain)

    def _end_string(self) -> None:
        content = b"".join(self._content)
        self.text += content
        self.string_bytes += len(content)
        self._content, self._upload = [], None


def _uncut(plain: bytes) -> int:
    """The length without what may continue in the next piece."""
    match = _CUT.search(plain, max(0, len(plain) - _LONGEST_CUT))
    assert match is not None
    return match.start()


def _unescape(content: bytes | bytearray) -> bytes | bytearray:
    """Resolve escapes; content without any is not looked at. Raises ValueError for a bad escape, half of a surrogate
    pair, and beside escapes what is not UTF-8.
    """
    if b"\\" not in content:
        return content
    text: str = json.loads(f'"{content.decode()}"', strict=False)
    return text.encode()
