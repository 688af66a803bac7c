"""Tensors whose weights are in oneDNN's order: their bytes, and the same tensors over bytes elsewhere.

PyTorch gives no view of such a tensor. Its C interface for compiled models (AOTInductor's `shim.h`) makes one over
memory, from a description that PyTorch also gives (`_get_mkldnn_serialized_md`).
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def is_opaque(tensor: Tensor) -> bool:
    """Whether a tensor is in oneDNN's order."""
    return tensor.is_mkldnn


def size_of(tensor: Tensor) -> int:
    """Bytes of its memory."""
    return int(torch.ops.mkldnn._nbytes(tensor))


def copy_to(tensor: Tensor, address: int) -> None:
    """Copy its memory, without the interpreter's lock."""
    ctypes.memmove(address, torch.ops.mkldnn.data_ptr(tensor), size_of(tensor))


def description(tensor: Tensor) -> bytes:
    """What `over` needs to know of its order."""
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(tensor).numpy())


def over(memory: Any, offset: int, shape: tuple[int, ...], dtype: torch.dtype, described: bytes) -> Tensor:
    """The tensor whose bytes are in a ctypes buffer, at an offset. It keeps the buffer alive."""
    library, handle = _library(), ctypes.c_void_p()
    sizes, strides = ((ctypes.c_int64 * len(shape))(*numbers) for numbers in (shape, [0] * len(shape)))
    error = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.addressof(memory) + offset,
        len(shape),
        sizes,
        strides,
        0,
        getattr(library, f"aoti_torch_dtype_{_TYPES[dtype]}")(),
        library.aoti_torch_device_type_cpu(),
        0,
        ctypes.byref(handle),
        library.aoti_torch_layout__mkldnn(),
        described,
        len(described),
    )
    if error:
        raise RuntimeError(f"PyTorch makes no tensor in oneDNN's order of shape {shape}")
    tensor: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(handle))
    tensor.memory = memory  # type: ignore[attr-defined]
    return tensor


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    sizes = pointer, i64, pointer, pointer, i64
    kinds = i32, i32, i32, pointer, i32
    library.aoti_torch_create_tensor_from_blob_v2.argtypes = (*sizes, *kinds, ctypes.c_char_p, i64)
    return library


def _capsule(handle: ctypes.c_void_p) -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return make(handle, None, None)
