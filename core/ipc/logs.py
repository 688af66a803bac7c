"""Logging of all processes: to stderr, as text or JSON lines, with the id of the request that a line is about.

The server configures itself; its children inherit the configuration through `core.ipc.process.spawn`.

Messages may contain what clients and files say. So that nobody can forge a line, the formatters escape all control
characters, and only a line of the log itself begins without an indentation.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import msgspec

LogFormat = Literal["text", "json"]
LOGGER = "stencil"
"""Name of the root of all loggers of the project."""

_request_id: ContextVar[str] = ContextVar("request_id", default="")


class LogConfig(msgspec.Struct, frozen=True):
    """The log settings of a process."""

    level: int = logging.WARNING  # of the project's own lines; libraries log warnings and above
    format: LogFormat = "text"


def configure(config: LogConfig, process: str) -> None:
    """Log to stderr from now on. process: its name in JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if config.format == "json" else TextFormatter())
    logging.basicConfig(level=max(config.level, logging.WARNING), handlers=[handler])
    logging.getLogger(LOGGER).setLevel(config.level)


def current() -> LogConfig:
    """The configuration of this process, or the closest one if an embedding program has set up logging."""
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
    return LogConfig(logging.getLogger(LOGGER).getEffectiveLevel(), "json" if is_json else "text")


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Lines logged inside, and in tasks started inside, have this request's id."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def current_request() -> str:
    """The request id of lines logged here; "" outside of a request."""
    return _request_id.get()


def of_request(request_id: str) -> dict[str, str]:
    """`extra` for a line about this request ("" = none), in any context."""
    return {"request_id": request_id}


def with_facts(**facts: Any) -> dict[str, Any]:
    """`extra` for a line with values beside its message."""
    return {"facts": facts}


def one_line(text: str) -> str:
    """The text with all characters escaped that end a line or control a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class TextFormatter(logging.Formatter):
    """time LEVEL logger [request id] message key=value ...

    Lines that belong to a message, such as those of a traceback, follow indented.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(request)s%(message)s%(shown_facts)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        request_id = _request_of(record)
        record.request = f"[{request_id}] " if request_id else ""
        record.shown_facts = one_line("".join(f" {key}={value}" for key, value in _flat(_facts_of(record))))
        if "\n" not in str(record.msg):  # whatever has several lines is an argument
            record.message = one_line(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        first, *others = super().format(record).split("\n")
        return "\n".join([one_line(first), *(f"    {one_line(line)}" for line in others)])


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC), level, logger, process, request_id, message, facts, exception."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
        }
        if request_id := _request_of(record):
            line["request_id"] = request_id
        line["message"] = record.getMessage()
        line |= _facts_of(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line).decode()
        except UnicodeEncodeError:  # a file's name need not be Unicode
            return json.dumps(line)


def _request_of(record: logging.LogRecord) -> str:
    return str(getattr(record, "request_id", _request_id.get()))


def _facts_of(record: logging.LogRecord) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = getattr(record, "facts", {})
    return facts


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
