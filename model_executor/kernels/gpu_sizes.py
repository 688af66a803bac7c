"""Sizes of the programs of GPU kernels."""

from __future__ import annotations

CHUNK = 1024
"""Numbers of a row that one program of `add_gated`, `swiglu` or `take_rows` processes."""

TILE = 4096
"""Numbers that one program of `attention_inputs`, `read_page` or `quantise` processes."""


def power_of_two(number: int) -> int:
    """The smallest power of two >= number."""
    return 1 << (number - 1).bit_length()


def warps(numbers: int) -> int:
    """Warps, of 32 threads each, for a program that processes `numbers` at a time."""
    return max(1, min(16, numbers // 512))
