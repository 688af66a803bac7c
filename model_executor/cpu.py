"""What this machine's CPU is, and how fast it multiplies bfloat16."""

from __future__ import annotations

import functools
import platform
from contextlib import suppress
from pathlib import Path

import torch

ZEN_3_AND_4 = "25"
"""AMD's number of their family, of which only Zen 4 has bfloat16."""


def cpu_name() -> str:
    """The CPU's model name, as "AMD EPYC 9654 96-Core Processor"."""
    return _fact("model name") or platform.processor()


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 natively."""
    return torch.cpu._is_avx512_bf16_supported() or cpu_has_amx()


def cpu_has_amx() -> bool:
    """Whether this CPU has AMX, which multiplies bfloat16 several times as fast as float32."""
    supported: bool = torch.cpu._is_amx_tile_supported()
    return supported


def cpu_gains_by_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 so much faster than float32 that converting to it and back is worth it.

    That is so with AMX, and on AMD's Zen 4, where a VAE's convolutions take half of the time. Another AMD CPU with
    AVX-512's bfloat16 was slower with it, probably of Zen 5, whose float32 units are twice as wide.
    """
    is_zen4 = (_fact("vendor_id"), _fact("cpu family")) == ("AuthenticAMD", ZEN_3_AND_4) and cpu_has_bfloat16()
    return cpu_has_amx() or is_zen4


@functools.cache
def _fact(name: str) -> str:
    """A line of the kernel's description of the first CPU; empty where there is none."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""
