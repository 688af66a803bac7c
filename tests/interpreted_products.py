"""Products of interpreted Triton kernels as a GPU computes them.

Triton's interpreter multiplies with NumPy, whose sums in float32 depend on where in a tile a row lies, and it reads the
bits of bfloat16 as integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def repair_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, have a tile's products be summed in float64, then rounded to float32: so a row's bits do not
    depend on its place, but on the tiles of its depth they do. Does nothing where kernels are compiled."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    def create_dot(_: Any, left: Any, right: Any, total: Any, *__: Any) -> Any:
        product = (_wide(left) @ _wide(right)).astype(total.data.dtype)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _wide(handle: Any) -> Any:
    """A tile in float64."""
    data = handle.data
    if handle.dtype.scalar.is_bf16():
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float64)
