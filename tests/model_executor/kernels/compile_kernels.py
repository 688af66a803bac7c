"""Compiles the GPU kernels to machine code on a machine without a GPU: `python compile_kernels.py 80 90`, with `--all`
for every dtype and size that models may use.

A separate program, because within a process Triton either interprets or compiles. Prints a line for each kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model_executor.kernels import triton_kernels as kernels

FLOATS = ("*bf16", "*fp16", "*fp32")
PAGES = ("int8", "bfloat16", "float32")
INTEGERS, LONGS, COUNT, NUMBER = "*i32", "*i64", "i32", "fp32"

Variant = tuple[Any, Mapping[str, str], Mapping[str, Any]]
"""A kernel, its arguments' types, its constants."""


def variants(every: bool) -> Iterator[Variant]:
    """The variants that FLUX uses, or those of every dtype and a few sizes."""
    yield kernels.find_places, {"requests": LONGS, "active": LONGS, "places": INTEGERS}, {"COLUMNS": 13, "BLOCK": 1024}
    for floats in FLOATS if every else FLOATS[:1]:
        yield from _residual_variants(floats, (64, 4096) if every else (4096,))
        yield kernels.swiglu, {"x": floats, "out": floats}, {"BLOCK": 1024}
        yield kernels.take_rows, {"x": floats, "rows": INTEGERS, "out": floats}, {"BLOCK": 1024}
        turned = {"x": floats, "rows": INTEGERS, "weight": "*fp32", "rotary": "*fp32", "eps": NUMBER}
        for width, heads in ((64, 1), (64, 64), (128, 32)) if every else ((128, 32),):
            yield kernels.normalise_and_rotate, turned, {"WIDTH": width, "HEADS": heads}
        for width in (40, 64, 128) if every else (128,):
            block = 1 << (width - 1).bit_length()
            sizes = {"WIDTH": width, "BLOCK": block, "TOKENS": 4096 // block}
            yield kernels.quantise, {"x": floats, "values": "*i8", "scales": "*fp32"}, sizes
            for page in PAGES if every else PAGES[:1]:
                yield from _page_variants(floats, page, sizes)
                yield from _input_variants(floats, page, sizes)
            yield from _input_variants(floats, "", sizes)


def _residual_variants(floats: str, blocks: Sequence[int]) -> Iterator[Variant]:
    columns = ("x", "y", "sums", "gate", "second_sums", "second_gate", "factor", "shift", "second_factor")
    types = {"rows": INTEGERS, "requests": INTEGERS, "eps": NUMBER, "sum_eps": NUMBER}
    types |= dict.fromkeys((*columns, "second_shift", "out"), floats)
    is_clipped = {"IS_CLIPPED": floats == "*fp16"}
    yield kernels.add_gated, types, {"BLOCK": 1024, **is_clipped}
    for block, has_sums, is_rms in product(blocks, (False, True), (False, True)):
        constants = {"HAS_SUMS": has_sums, "NORMS_SUMS": has_sums and is_rms, "IS_RMS": is_rms}
        yield kernels.add_norm, types, {"BLOCK": block, **constants, **is_clipped}
    for block in blocks:
        yield kernels.add_normed, types, {"BLOCK": block, **is_clipped}


def _input_variants(floats: str, page: str, sizes: Mapping[str, int]) -> Iterator[Variant]:
    types = {"tiles": INTEGERS, "requests": LONGS, "places": INTEGERS, "first": floats, "second": floats, "eps": NUMBER}
    types |= {
        "rotary": "*fp32",
        "addresses": LONGS,
        "shares": "*fp32" if page else floats,
        "joint": floats,
        "queries": floats,
    }
    for has_norm, has_second in product((False, True), (False, True)):
        if has_norm and sizes["WIDTH"] != sizes["BLOCK"]:
            continue
        weight = "*fp32" if has_norm else floats
        norm = {"first_weight": weight, "second_weight": weight, **({} if has_norm else {"rotary": floats})}
        constants = {"COLUMNS": 13, "HAS_SECOND": has_second, "HAS_NORM": has_norm, "PAGE": page, **sizes}
        yield kernels.attention_inputs, types | norm, constants


def _page_variants(floats: str, page: str, sizes: Mapping[str, int]) -> Iterator[Variant]:
    for has_fresh in (False, True):
        types = {"addresses": LONGS, "shares": "*fp32", "out": floats, "fresh": floats, "places": LONGS}
        types |= {"places": INTEGERS} if has_fresh else {}
        yield kernels.read_page, types, {**sizes, "PAGE": page, "HAS_FRESH": has_fresh}


def compile_variant(variant: Variant, capability: int) -> int:
    """Compile a variant; returns the size of its machine code in bytes. Raises what Triton's compiler raises."""
    kernel, types, constants = variant
    signature = {name: "constexpr" if name in constants else types.get(name, COUNT) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return len(compiled.asm["cubin"])


if __name__ == "__main__":
    for capability in map(int, filter(str.isdecimal, sys.argv[1:])):
        for variant in variants("--all" in sys.argv):
            kernel, types, constants = variant
            size = compile_variant(variant, capability)
            print(kernel.__name__, capability, size, dict(types), dict(constants))
