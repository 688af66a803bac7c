"""Compiles a UNet's GPU kernels on a machine without a GPU, as `compile_kernels.py` does: `python
compile_unet_kernels.py 80 90`, with `--all` for every dtype. Prints a line for each kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model_executor.kernels import unet_kernels as kernels

FLOATS = ("*bf16", "*fp16", "*fp32")
TABLE = {"table": "*i64", "weights": "*fp32"}

Variant = tuple[Any, Mapping[str, str], Mapping[str, Any]]
"""A kernel, its arguments' types, its constants."""


def variants(every: bool) -> Iterator[Variant]:
    """The variants that Stable Diffusion XL uses in bfloat16 with int8 pages, or those of every dtype."""
    yield kernels.find_places, {"active": "*i64", "places": "*i32"}, {"TOKENS": 256}
    for floats in FLOATS if every else FLOATS[:1]:
        norm = {"weight": floats, "bias": floats, "eps": "fp32"}
        gathered = dict.fromkeys(("x", "normed", "some", "some_normed"), floats)
        for side in (1, 2) if every else (2,):
            constants = {"SIDE": side, "ROWS": 1, "BLOCK": 2048}
            yield kernels.norm_and_gather, {**gathered, **norm, "active": "*i64"}, constants
        yield kernels.add_and_norm, {"x": floats, "y": floats, "normed": floats, **norm}, {"ROWS": 2, "BLOCK": 1024}
        yield kernels.geglu, {"x": floats, "out": floats}, {"ROWS": 1, "BLOCK": 1024}
        added = dict.fromkeys(("own", "change", "bias", "out"), floats)
        yield kernels.add_biased, {**added, "scale": "fp32"}, {"HAS_BIAS": True, "PIXELS": 64, "BLOCK": 64}
        yield kernels.cut_twice_as_large, {"x": floats, "out": floats}, {"PIXELS": 64, "BLOCK": 64}
        for page in kernels.VALUES if every else ("int8",):
            variants = [*_group_norms(floats, page), *_fills(floats, page)]
            yield from variants if every else variants[::3]


def _group_norms(floats: str, page: str) -> Iterator[Variant]:
    maps = dict.fromkeys(("x", "bias", "time", "weight", "shift", "out", "raw"), floats)
    types = {**maps, **TABLE, "moments": "*fp32", "outside": "*fp32", "eps": "fp32", "share": "fp32"}
    for has_more, (groups, size, width) in product((False, True), ((4, 10, 16), (1, 40, 64), (1, 80, 128))):
        sizes = {"PIXELS": 4096 // (groups * width), "GROUPS": groups, "SIZE": size, "WIDTH": width}
        flags = {"HAS_BIAS": has_more, "HAS_TIME": has_more, "HAS_OUTSIDE": has_more}
        moments = {"TOKENS": 256, "MOMENT": kernels.MOMENTS[page]}
        yield kernels.group_moments, types, {**sizes, **flags, **moments}
        ways = {"CHUNKS": 32, "SILU": has_more, "RAW": 0 if has_more else 2}
        yield kernels.normalise_groups, types, {**sizes, **flags, **ways}


def _fills(floats: str, page: str) -> Iterator[Variant]:
    maps = dict.fromkeys(("own", "change", "bias", "out"), floats)
    types = {**maps, **TABLE, "places": "*i32", "scale": "fp32", "block_byte": "i64"}
    for is_box, own in ((False, 1), (True, 2), (True, 1), (True, 0)):
        constants = {
            **{"VALUE": kernels.VALUES[page], "HAS_SCALES": page == "int8", "ALIGNED": True, "BOX": is_box},
            **{"SIDE": 2, "OWN": own, "HAS_BIAS": is_box, "SIZE": 64, "ROWS": 64, "BLOCK": 64},
        }
        yield kernels.fill, types, constants


def compile_variant(variant: Variant, capability: int) -> Any:
    """Compile a variant. Raises what Triton's compiler raises."""
    kernel, types, constants = variant
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


if __name__ == "__main__":
    for capability in map(int, filter(str.isdecimal, sys.argv[1:])):
        for variant in variants("--all" in sys.argv):
            compiled = compile_variant(variant, capability)
            print(variant[0].__name__, capability, len(compiled.asm["cubin"]), dict(variant[2]))
