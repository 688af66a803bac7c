"""Interpreted Triton kernels that multiply as a GPU does.

Triton's interpreter multiplies with NumPy, whose sums in float32 depend on where in a tile a row lies; it takes the
bits of bfloat16 for integers; and it replaces functions of Triton's language while a kernel runs, so that two threads
disturb each other.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch


def repair_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, products within a tile are summed in float64 and then rounded to float32, so a row's bits do
    not depend on its place, but still on how its depth is divided; and kernels of several threads run one after the
    other. Does nothing where kernels are compiled."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    run, lock = interpreter.GridExecutor.__call__, Lock()

    def create_dot(_: Any, left: Any, right: Any, total: Any, *__: Any) -> Any:
        product = (_wide(left) @ _wide(right)).astype(total.data.dtype)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    def run_alone(*args: Any, **constants: Any) -> None:
        with lock:
            run(*args, **constants)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_alone)


def _wide(handle: Any) -> Any:
    """A tile in float64."""
    data = handle.data
    if handle.dtype.scalar.is_bf16():
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float64)
