"""What this machine's CPU is, and how fast it multiplies bfloat16."""

from __future__ import annotations

import functools
import platform
from contextlib import suppress
from pathlib import Path

import torch


def cpu_name() -> str:
    """The CPU's model name, as "AMD EPYC 9654 96-Core Processor"."""
    return _fact("model name") or platform.processor()


def cpu_features() -> str:
    """Its name and all instruction sets that it has, on which what a compiler makes for it depends."""
    return f"{platform.machine()} {cpu_name()} {_fact('flags') or _fact('Features')}"


def cpu_description() -> str:
    """Its name, and what decides how it computes: the instruction sets that PyTorch uses, and what is in bfloat16."""
    bfloat16 = (" bfloat16" if cpu_has_bfloat16() else "") + (" fast" if cpu_gains_by_bfloat16() else "")
    return f"{cpu_name()} {torch.backends.cpu.get_cpu_capability()}{bfloat16}"


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 natively."""
    return torch.cpu._is_avx512_bf16_supported() or cpu_has_amx()


def cpu_has_amx() -> bool:
    """Whether this CPU has AMX, which multiplies bfloat16 several times as fast as float32, and the system lets this
    process use it."""
    supported: bool = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    return supported


def cpu_gains_by_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 so much faster than float32 that converting to it and back is worth it.

    That is so with AMX, and on AMD's CPUs since Zen 4: on Zen 4 and Zen 5 a VAE's convolutions take half of the time.
    With AVX-512's bfloat16 alone, another CPU was slower.
    """
    return cpu_has_amx() or (_fact("vendor_id") == "AuthenticAMD" and cpu_has_bfloat16())


@functools.cache
def _fact(name: str) -> str:
    """A line of the kernel's description of the first CPU; empty where there is none."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""
