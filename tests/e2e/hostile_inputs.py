"""Requests for a workflow with one input that is not as it is declared."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass
from random import Random
from typing import Any

Value = str | bytes | int | float
"""Of an input: a file for a picture."""

Parts = list[tuple[str, Any]]
"""Of a form: (name, (file name, content)), as httpx takes them; without a file name it is a field."""


@dataclass(frozen=True)
class Malformed:
    """body: for httpx. param: the input that the answer has to name."""

    body: dict[str, Any]
    param: str


@dataclass(frozen=True)
class Workflow:
    """What it takes. right: input -> a value that fits. required: inputs that it cannot do without."""

    name: str
    right: dict[str, Value]
    required: tuple[str, ...]
    kinds: dict[str, str]  # input -> kind, of `WRONG_TEXTS` or "picture"


WRONG_TEXTS: dict[str, tuple[str, ...]] = {
    "integer": (
        "2.5",
        "abc",
        "0x10",
        "1e400",
        "nan",
        "inf",
        "--1",
        "1 2",
        "9" * 30,
        "-" + "9" * 30,
        "\x00",
        "1;2",
        "½",
    ),
    "number": ("much", "nan", "inf", "-Infinity", "1e999", "1,5", "--1", "0x1p3", "1 2", "\x00", "½"),
    "truth": ("perhaps", "2", "-1", "tru", "nope", "\x00", "1.0", "[true]"),
    "text": ("ü" * 9, "x" * 17, "x" * 5000, "\N{GRINNING FACE}" * 5),
}
"""Kind of input -> texts that are none. A text of an input has at most 16 bytes."""

WRONG_MEMBERS: dict[str, tuple[Any, ...]] = {
    "integer": (2.5, [], {}, [1], {"a": 1}, 2**63, -(2**63) - 1, 10**30),
    "number": ([], {}, [1.0], {"a": 1.0}),
    "truth": ([], {}, 2, 0.5, [True]),
    "text": ([], {}, ["a"], {"a": "b"}),
    "picture": (3, True, {}, 0.5, "https://example.com/a.png", "file:///etc/passwd", "no base64!"),
}
"""Kind of input -> members of JSON that are none, beside the texts."""


def malformed(random: Random, workflow: Workflow) -> Malformed:
    """A request that is wrong in one input: its value, its kind, or that it is there twice or not at all."""
    param = random.choice([*workflow.right])
    kind, others = workflow.kinds[param], _others(random, workflow, param)
    match random.randrange(5):
        case 0 if param in workflow.required:
            return _form(workflow, others, [], param)
        case 1 if kind != "picture":  # a file, where a field is due
            return _form(workflow, others, [(param, ("a.png", random.randbytes(random.randrange(1, 200))))], param)
        case 2 | 3:
            return _json(workflow, others, _wrong_member(random, workflow, param), param)
    wrong = _wrong_file(random, workflow.right[param]) if kind == "picture" else random.choice(WRONG_TEXTS[kind])
    return _form(workflow, others, [(param, _part(wrong))], param)


def _others(random: Random, workflow: Workflow, param: str) -> dict[str, Value]:
    """The other inputs, as they are declared; some that are not required are left out."""
    return {
        name: value
        for name, value in workflow.right.items()
        if name != param and (name in workflow.required or random.random() < 0.5)
    }


def _form(workflow: Workflow, others: dict[str, Value], wrong: Parts, param: str) -> Malformed:
    parts = [("model", (None, workflow.name)), *((name, _part(value)) for name, value in others.items()), *wrong]
    return Malformed({"files": parts}, param)


def _json(workflow: Workflow, others: dict[str, Value], wrong: Any, param: str) -> Malformed:
    members = {name: _url(value) if isinstance(value, bytes) else value for name, value in others.items()}
    return Malformed({"json": {"model": workflow.name, **members, param: wrong}}, param)


def _wrong_member(random: Random, workflow: Workflow, param: str) -> Any:
    kind, right = workflow.kinds[param], workflow.right[param]
    if kind == "picture" and random.random() < 0.7:
        return _url(_wrong_file(random, right))
    return random.choice((*WRONG_MEMBERS[kind], *WRONG_TEXTS.get(kind, ())))


def _wrong_file(random: Random, right: Value) -> bytes:
    """No picture: bytes, one that is cut short or has other bytes at its beginning, or one that says to be huge."""
    assert isinstance(right, bytes)
    match random.randrange(4):
        case 0:
            return random.randbytes(random.randrange(1, 300))
        case 1:
            return right[: random.randrange(1, len(right) // 2)]
        case 2:
            return random.randbytes(8) + right[8:]
        case _:
            return _png_of(random.choice([30_000, 2**20, 2**31 - 1]))


def _png_of(side: int) -> bytes:
    """A PNG file that says to have so many rows and columns, and has one byte."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def _part(value: Value) -> tuple[str | None, str | bytes]:
    """A file or a field of a form."""
    return ("a.png", value) if isinstance(value, bytes) else (None, str(value).lower())


def _url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"
