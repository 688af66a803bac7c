"""A JSON body with pictures in it, read as it streams in.

A parser would hold the interpreter for a tenth of a second over a body of 100 MB. So strings beyond 512 KiB, which only
pictures have, are taken out before anything is parsed: each becomes an upload of its own, with a marker in its place.
"""

from __future__ import annotations

import re
import uuid

from entrypoints.openai.uploads import SpooledUpload

LONG_STRING_BYTES = 512 * 1024
"""More than any valid text field: 32000 characters are at most 12 bytes each, as escaped surrogate pairs."""
_CONTENT = re.compile(rb'(?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+')  # of a string, up to its end or a cut escape
_ESCAPE = re.compile(rb"\\(u[0-9a-fA-F]{4}|[^u])")
_LONGEST_ESCAPE = 6
_SIMPLE_ESCAPES = {b"/": b"/", b"n": b"\n", b"r": b"\r", b"t": b"\t"}


class JsonBody:
    """feed all chunks, then read `text`: the document without its long strings, and `long_strings` by their markers."""

    def __init__(self) -> None:
        self.text = bytearray()
        self.long_strings: dict[str, SpooledUpload] = {}
        self._marker = f"long-string-{uuid.uuid4().hex}"  # nobody can guess it
        self._is_in_string = False
        self._start = 0  # where in `text` the current string begins
        self._upload: SpooledUpload | None = None  # of the current string, once it is long
        self._rest = b""  # an escape that the chunk's end cut

    def close(self) -> None:
        """Free the uploads."""
        for upload in self.long_strings.values():
            upload.close()

    async def feed(self, chunk: bytes) -> None:
        data, self._rest = self._rest + chunk, b""
        position = 0
        while position < len(data):
            if self._is_in_string:
                position = await self._feed_string(data, position)
            else:
                position = self._feed_between(data, position)

    def _feed_between(self, data: bytes, position: int) -> int:
        """Up to and with the next string's opening quote."""
        end = data.find(b'"', position) + 1
        self._is_in_string = end > 0
        end = end or len(data)
        self.text += data[position:end]
        self._start = len(self.text)
        return end

    async def _feed_string(self, data: bytes, position: int) -> int:
        match = _CONTENT.match(data, position)
        assert match is not None  # it matches nothing, too
        end = match.end()
        await self._append(data[position:end])
        if data[end : end + 1] == b'"':
            self._end_string()
            return end + 1
        if len(data) - end < _LONGEST_ESCAPE:
            self._rest = data[end:]
            return len(data)
        self.text += data[end : end + 2]  # no escape at all: the parser will say so
        return end + 2

    async def _append(self, content: bytes) -> None:
        if self._upload is not None:
            await self._upload.write(_unescape(content))
            return
        self.text += content
        if len(self.text) - self._start > LONG_STRING_BYTES:
            marker = f"{self._marker}-{len(self.long_strings)}"
            self._upload = self.long_strings[marker] = SpooledUpload()
            await self._upload.write(_unescape(bytes(self.text[self._start :])))
            self.text[self._start :] = marker.encode()

    def _end_string(self) -> None:
        self.text += b'"'
        self._is_in_string, self._upload = False, None


def _unescape(content: bytes) -> bytes:
    """Resolves the escapes that base64 text may have; others are left, as they make it invalid in any case."""
    return _ESCAPE.sub(_unescape_one, content) if b"\\" in content else content


def _unescape_one(match: re.Match[bytes]) -> bytes:
    escape = match[1]
    if escape[:1] == b"u":
        return chr(int(escape[1:], 16)).encode("utf-8", "replace")
    return _SIMPLE_ESCAPES.get(escape, match[0])
