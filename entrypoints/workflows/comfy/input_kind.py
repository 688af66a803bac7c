"""InputKind: what an input of a ComfyUI node may be."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from core.validation import shorten


@dataclass(frozen=True, slots=True)
class Link:
    """An output of another node."""

    type: str  # of that output, as ComfyUI calls it
    is_optional: bool = False


class Widget(ABC):
    """A value that the graph says itself."""

    __slots__ = ()

    @abstractmethod
    def problem(self, value: object) -> str:
        """Why it is no such value; "": it is one."""


@dataclass(frozen=True, slots=True)
class Text(Widget):
    """Text of at most so many characters."""

    most: int = 255

    def problem(self, value: object) -> str:
        if not isinstance(value, str):
            return _another(value, "text")
        if not value.isascii() and any("\ud800" <= each <= "\udfff" for each in value):
            return "it is no text in UTF-8"
        return f"it has {len(value)} characters, and may have {self.most}" if len(value) > self.most else ""


@dataclass(frozen=True, slots=True)
class Integer(Widget):
    """A whole number."""

    low: int
    high: int

    def problem(self, value: object) -> str:
        if not isinstance(value, int) or isinstance(value, bool):
            return _another(value, "a whole number")
        return "" if self.low <= value <= self.high else f"it is not from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Number(Widget):
    """A finite number."""

    low: float
    high: float

    def problem(self, value: object) -> str:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return _another(value, "a number")
        is_one = isinstance(value, int) or math.isfinite(value)
        return "" if is_one and self.low <= value <= self.high else f"it is not from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class Flag(Widget):
    """true or false."""

    def problem(self, value: object) -> str:
        return "" if isinstance(value, bool) else _another(value, "true or false")


@dataclass(frozen=True, slots=True)
class Choice(Widget):
    """One of some words. why: none of the others that ComfyUI has is served."""

    words: tuple[str, ...]
    why: str = ""

    def problem(self, value: object) -> str:
        if isinstance(value, str) and value in self.words:
            return ""
        why = f"{self.why}; " if self.why else ""
        return f"{_shown(value)}: {why}there are {', '.join(self.words)}"


@dataclass(frozen=True, slots=True)
class Unread(Widget):
    """What has no meaning outside of ComfyUI's own pages."""

    def problem(self, value: object) -> str:
        return "" if isinstance(value, str | int | float | bool | None) else _another(value, "a plain value")


InputKind = Link | Widget


def _another(value: object, wanted: str) -> str:
    return f"{_shown(value)}: {wanted} is wanted"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(shorten(value))
    if isinstance(value, list | dict):
        return "a link or list" if isinstance(value, list) else "an object"
    return shorten(f"{value!r:.80}") if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
