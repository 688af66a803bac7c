"""Reads multipart/form-data while it arrives: every part goes to a SpooledUpload, and limits apply to each byte.

Not Starlette's form parser, which has no limit for files, and a small fixed one for text parts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from core.errors import InvalidRequestError
from entrypoints.openai.body.uploads import SpooledUpload, file_too_large

MAX_PARTS = 256


@dataclass
class Part:
    """One part of a form."""

    name: str
    filename: str | None  # None: a text field
    limit: int = 0  # bytes; set from the PartRule at the first byte
    keep: bool = False  # False: counted and checked, but not stored
    received: int = 0  # bytes
    content: SpooledUpload = field(default_factory=SpooledUpload)

    @property
    def is_file(self) -> bool:
        return self.filename is not None

    @property
    def is_empty_file_input(self) -> bool:
        """Whether the part is what browsers send for a file input that was left empty."""
        return self.filename == "" and self.received == 0

    async def text(self) -> str:
        """The part as text, with newlines as the user typed them: browsers send each as CR LF (HTML standard,
        multipart/form-data encoding algorithm). Raises InvalidRequestError if it is not UTF-8."""
        try:
            return (await self.content.read()).decode().replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"Invalid '{self.name}': not valid UTF-8.", param=self.name) from error


PartRule = Callable[[Part, Sequence[Part]], tuple[int, bool]]
"""(a part at its first byte, the parts before it) -> (limit in bytes, whether to keep the content)."""


async def read_multipart(stream: AsyncIterator[bytes], content_type: str, rule: PartRule) -> list[Part]:
    """All parts in order. Raises RequestTooLargeError at the first byte beyond a part's limit, and InvalidRequestError
    (``invalid_multipart``) for a malformed or truncated body; the parts are closed then.
    """
    reader = _Reader(_boundary(content_type), rule)
    try:
        async for chunk in stream:
            await reader.feed(chunk)
        reader.finish()
    except BaseException:
        for part in reader.parts:
            part.content.close()
        raise
    return reader.parts


class _Reader:
    """Turns the parser's callbacks into parts. They are synchronous, so content is written after each chunk instead."""

    def __init__(self, boundary: bytes, rule: PartRule) -> None:
        self.parts: list[Part] = []
        self._rule = rule
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""
        self._arrived: list[tuple[Part, bytes]] = []  # not yet written
        self._is_complete = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_end": self._on_end,
            },
        )

    async def feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _malformed(str(error)) from error
        for part, data in self._arrived:
            await part.content.write(data)
        self._arrived.clear()

    def finish(self) -> None:
        if not self._is_complete:
            raise _malformed("the closing boundary is missing")

    def _on_part_begin(self) -> None:
        if len(self.parts) == MAX_PARTS:
            raise _malformed(f"more than {MAX_PARTS} parts")
        self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise _malformed("a part has no name")
        name = options[b"name"].decode(errors="replace")
        filename = options[b"filename"].decode(errors="replace") if b"filename" in options else None
        self.parts.append(Part(name, filename))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = self.parts[-1]
        if part.received == 0:
            part.limit, part.keep = self._rule(part, self.parts[:-1])
        part.received += end - start
        if part.received > part.limit:
            raise file_too_large(part.name.partition("[")[0], part.limit)
        if part.keep:
            self._arrived.append((part, data[start:end]))

    def _on_end(self) -> None:
        self._is_complete = True


def _boundary(content_type: str) -> bytes:
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= 70:  # RFC 2046, 5.1.1
        raise _malformed("the content type has no boundary of 1 to 70 characters")
    return boundary


def _malformed(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"Could not parse the multipart body: {what}.", code="invalid_multipart")
