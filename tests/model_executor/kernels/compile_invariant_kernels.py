"""Compiles the kernels of `--batch-invariant` for a GPU on a machine without one: `python compile_invariant_kernels.py
90`, with `--all` for every dtype and a few head dims.

Prints a line for each variant: its name, dtype, bytes of shared memory, and instructions of tensor cores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model_executor.kernels import invariant_kernels as kernels
from model_executor.kernels.invariant import GROUP, PRODUCT_TILES, attend_sizes, precision

FLOATS = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}
POINTERS = {"query_starts": "*i32", "key_starts": "*i32", "scale": "fp32", "eps": "fp32"}
UNALIGNED = ("rows", "heads")  # numbers that Triton must not know to be multiples of 16, and steps in heads

Variant = tuple[Any, str, Mapping[str, Any], Mapping[str, int]]
"""A kernel, the type of its tensors, its constants, and how a program runs."""


def variants(every: bool) -> Iterator[Variant]:
    for name in FLOATS if every else ("*bf16",):
        dtype = FLOATS[name]
        tiles = PRODUCT_TILES[dtype]
        sizes = {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth, "GROUP": GROUP}
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        for is_whole, has_gelu in ((True, False), (True, True), (False, False)) if every else ((True, True),):
            flags = {"IS_WHOLE": is_whole, "HAS_BIAS": True, "HAS_GELU": has_gelu, "PRECISION": precision(dtype)}
            yield kernels.product, name, sizes | flags, options
        for head_dim in (16, 64, 72, 128, 256) if every else (128,):
            yield kernels.attend, name, *attend_sizes(dtype, head_dim)
        yield kernels.rms_norm, name, {"BLOCK": 4096}, {"num_warps": 8}


def compile_variant(variant: Variant, capability: int) -> tuple[int, int]:
    """(bytes of shared memory, instructions of tensor cores) of a variant. Raises what Triton's compiler raises."""
    kernel, floats, constants, options = variant
    arguments = [name for name in kernel.arg_names if name not in constants]
    types = {name: _type(name, floats) for name in arguments} | dict.fromkeys(constants, "constexpr")
    aligned = [name for name in arguments if types[name] != "fp32" and not name.endswith(UNALIGNED)]
    aligned = [name for name in aligned if kernel is not kernels.attend or types[name] != "i32"]
    hints = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, dict(constants), hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    ptx = compiled.asm["ptx"]
    return compiled.metadata.shared, ptx.count("mma.sync") + ptx.count("wgmma.mma_async")


def _type(name: str, floats: str) -> str:
    is_float = name in ("x", "weight", "bias", "out", "query", "key", "value")
    return floats if is_float else POINTERS.get(name, "i32")


if __name__ == "__main__":
    for capability in map(int, filter(str.isdecimal, sys.argv[1:])):
        for variant in variants("--all" in sys.argv):
            print(variant[0].__name__, variant[1], *compile_variant(variant, capability))
