"""Types for argparse: functions that convert a flag's text, and raise argparse.ArgumentTypeError if it is invalid."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from core.config import MAX_CACHE_BYTES, MAX_ENGINES, AdapterConfig
from core.errors import ConfigError
from core.paths import expanded
from entrypoints.hosts import normal_host

_PAGE_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # short names
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


def whole_number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {low} to {high}")
        return int(text)

    return parse


def engine_count(text: str) -> int:
    """A number of engines, or 0 for "auto"."""
    return 0 if text == "auto" else whole_number(1, MAX_ENGINES)(text)


def byte_count(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18})([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    size = int(match[1]) * _UNITS[match[2].upper()] if match else -1
    if not 0 <= size <= MAX_CACHE_BYTES:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of bytes, such as 1000000, 512M or 4G")
    return size


def auto_or_bytes(text: str) -> int | None:
    """A number of bytes, or None for "auto"."""
    return None if text == "auto" else byte_count(text)


def keyframes(text: str) -> str:
    if text not in ("auto", "per-step") and not (re.fullmatch(r"[0-9]{1,2}", text) and 2 <= int(text) <= 64):
        raise argparse.ArgumentTypeError(f"'{text}' is none of auto, per-step, 2 to 64")
    return text


def page_dtype(text: str) -> str:
    return _PAGE_DTYPES.get(text, text)


def decimal(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not a number from {low:g} to {high:g}")
        return value

    return parse


def milliseconds(text: str) -> float:
    """Milliseconds of at most a day, as seconds."""
    return decimal(0, 86_400_000)(text) / 1e3


def http_url(text: str) -> str:
    if text and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not an http:// or https:// URL")
    return text


def web_origin(text: str) -> str:
    """An origin, spelled as in browsers' `Origin` headers, or * for any."""
    if text != "*" and not re.fullmatch(r"https?://[^/\s*?#@]+", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(f"'{text}' is no origin such as https://app.example or http://localhost:3000")
    origin = text.lower()
    return origin.removesuffix(":443" if origin.startswith("https:") else ":80")  # browsers omit default ports


def host(text: str) -> str:
    """A name or an address, normalised by `entrypoints.hosts`, or * for any."""
    name = text if text == "*" else normal_host(text.removeprefix("[").removesuffix("]"))
    if name is None:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no host such as pictures.example or 192.168.1.5, without scheme or port"
        )
    return name


def named_adapter(text: str) -> AdapterConfig:
    """An adapter given as NAME=PATH; the path must exist."""
    name, _, path = text.partition("=")
    if not re.fullmatch(r"[\w.:-]+", name) or not path:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=PATH, with a name of letters, digits and _ . : -")
    try:
        is_there = expanded(path).exists()
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read '{path}': {error.strerror}") from error
    if not is_there:
        raise argparse.ArgumentTypeError(f"there is no file '{path}'")
    return AdapterConfig(name, path)


def device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"'{text}' is none of auto, cpu, cuda, cuda:N")
    return text
