"""Log lines: request ids, the two formats, and that child processes log like their parent."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import ipc_children
from hypothesis import given
from hypothesis import strategies as st

from core.ipc.logs import JsonFormatter, TextFormatter, of_request, request_context, with_facts

ROOT = Path(__file__).resolve().parents[3]
FACTS = {"status": 200, "ms": {"queue": 1.5, "decode": 2.0}}


class Lines(logging.Handler):
    """Everything logged, formatted."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def logger_to(formatter: logging.Formatter) -> tuple[logging.Logger, list[str]]:
    logger, handler = logging.Logger("stencil.test"), Lines(formatter)
    logger.addHandler(handler)
    return logger, handler.lines


def test_text_lines_have_level_name_and_request_id() -> None:
    logger, lines = logger_to(TextFormatter())
    logger.info("nobody's")
    with request_context("req_1"):
        logger.warning("done in %d ms", 5, extra=with_facts(**FACTS))
        try:
            raise ValueError("why")
        except ValueError:
            logger.exception("broken")
    logger.info("of another", extra=of_request("req_2"))
    assert lines[0].endswith(" INFO stencil.test nobody's")
    assert lines[1].endswith(" WARNING stencil.test [req_1] done in 5 ms status=200 ms.queue=1.5 ms.decode=2.0")
    assert " ERROR stencil.test [req_1] broken\n    Traceback" in lines[2]
    assert lines[2].endswith("ValueError: why")
    assert lines[3].endswith("[req_2] of another")


FORGED = "2026-01-01 00:00:00,000 INFO stencil.api served"


@given(st.text() | st.sampled_from([f"{end}{FORGED}" for end in ("\n", "\r", "\r\n", "\x85", "\u2028", "\x1b[2K\x0b")]))
def test_no_text_from_outside_makes_a_line_of_its_own(text: str) -> None:
    logger, lines = logger_to(TextFormatter())
    logger.info("not loaded: %s", text, extra=with_facts(path=text))
    logger.error("failed: %s\n%s", text, text)
    try:
        raise ValueError(text)
    except ValueError as error:
        logger.error("failed: %s", error, exc_info=error)
    assert len(lines[0].splitlines()) == 1
    for line in lines:
        assert all(part.startswith("    ") for part in line.splitlines()[1:])
        assert line.replace("\n", "").isprintable()


def test_json_lines_have_level_request_id_and_facts() -> None:
    logger, lines = logger_to(JsonFormatter("stencil-engine"))
    with request_context("req_1"):
        logger.info('a "quoted" %s\nof two lines', "text", extra=with_facts(**FACTS))
        try:
            raise ValueError("why")
        except ValueError:
            logger.exception("broken")
    logger.warning("nobody's")
    assert not any("\n" in line for line in lines)
    first, second, third = (json.loads(line) for line in lines)
    time = first.pop("time")
    assert (len(time), time[10], time[-1]) == (24, "T", "Z")
    assert first == {
        "level": "info",
        "logger": "stencil.test",
        "process": "stencil-engine",
        "request_id": "req_1",
        "message": 'a "quoted" text\nof two lines',
        **FACTS,
    }
    assert second["exception"].endswith("ValueError: why")
    assert third.keys() == {"time", "level", "logger", "process", "message"}


def test_a_name_that_is_no_unicode_is_told_of_too() -> None:
    """As of a file; the operating system allows any bytes."""
    logger, lines = logger_to(JsonFormatter("stencil-engine"))
    logger.warning("not loaded: %s", "caf\udce9", extra=with_facts(path="caf\udce9"))
    (line,) = (json.loads(line) for line in lines)
    assert (line["level"], line["message"], line["path"]) == ("warning", "not loaded: caf\udce9", "caf\udce9")


async def test_tasks_log_for_the_request_they_were_started_by() -> None:
    logger, lines = logger_to(TextFormatter())
    begun = asyncio.Event()

    async def work(number: int) -> None:
        await begun.wait()
        logger.info("work %d", number)

    async with asyncio.TaskGroup() as tasks:
        for number in (1, 2):
            with request_context(f"req_{number}"):
                tasks.create_task(work(number))
        begun.set()
    assert [line.split("stencil.test ")[1] for line in lines] == ["[req_1] work 1", "[req_2] work 2"]


def child_lines(level: str, form: str) -> list[str]:
    """The stderr of a process with this configuration, its child and its grandchild."""
    code = f"""
import logging, ipc_children
from core.ipc import logs
logs.configure(logs.LogConfig(logging.{level}, {form!r}), "parent")
ipc_children.log_and_spawn(b"2", [])
"""
    path = {"PYTHONPATH": f"{ROOT}:{Path(ipc_children.__file__).parent}"}
    result = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=True)
    return result.stderr.splitlines()


def test_children_log_as_their_parent() -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in child_lines("INFO", "json")]
    assert [(line["process"], line["logger"], line["level"]) for line in lines] == [
        (process, logger, level)
        for process in ("parent", "generation-1", "generation-0")
        for logger, level in (("stencil.test", "info"), ("library", "warning"))
    ]


def test_children_log_no_more_than_their_parent() -> None:
    lines = child_lines("ERROR", "text")
    assert lines == []
    assert len(child_lines("WARNING", "text")) == 3
