"""Form: the type and the greatest size of a value that passes between nodes with ports of their own.

Every value is an array: numbers have no sides, text is its UTF-8 bytes, a picture is RGB. So that memory can be taken
before a value is made, each side has a greatest length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Literal

FormKind = Literal["truth", "integer", "number", "text", "picture", "tensor"]
"""What a value is to the class that takes or makes it. truth, integer, number, text: Python's bool, int, float, str;
picture: uint8 [height, width, 3], RGB; tensor: an array of any other shape."""

_DTYPES: dict[FormKind, str] = {
    "truth": "bool",
    "integer": "int64",
    "number": "float64",
    "text": "uint8",
    "picture": "uint8",
}

_PLAIN_TYPES: dict[FormKind, tuple[type, ...]] = {
    "truth": (bool,),
    "integer": (int,),
    "number": (float, int),
    "text": (str,),
}
"""Kind of a value -> Python's types of it; pictures and tensors are arrays."""

_LEAST_INTEGER, _MOST_INTEGER = -(2**63), 2**63 - 1

TENSOR_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}
"""dtype of a tensor -> bytes of an element. NumPy has no bfloat16: only nodes can give it to each other."""

_NUM_SIDES: dict[FormKind, int] = {"truth": 0, "integer": 0, "number": 0, "text": 1, "picture": 3}
"""Kind of a value -> sides of its array; tensors have any number."""

MAX_SIDES = 8

MAX_FORM_BYTES = 2**30
"""Greatest size of one value: a quarter of the memory in which values move between ranks."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of the values that a port takes or makes. The functions below make forms."""

    kind: FormKind
    shape: tuple[int, ...] = ()  # greatest length of each side; of text: (UTF-8 bytes,); of numbers: ()
    tensor_dtype: str = ""  # of a tensor

    @property
    def dtype(self) -> str:
        """Name of the array's dtype."""
        return _DTYPES.get(self.kind, self.tensor_dtype)

    @property
    def size(self) -> int:
        """Most elements of the array."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Most bytes of the array."""
        return self.size * TENSOR_BYTES[self.dtype]

    @property
    def problem(self) -> str:
        """What is wrong with it; "": nothing."""
        if self.dtype not in TENSOR_BYTES:
            return f"there is no dtype {self.dtype}; there are {', '.join(TENSOR_BYTES)}"
        if len(self.shape) > MAX_SIDES or min(self.shape, default=1) < 1:
            return f"its shape {list(self.shape)} needs at most {MAX_SIDES} sides, each at least 1"
        is_picture = self.kind == "picture"
        if len(self.shape) != _NUM_SIDES.get(self.kind, len(self.shape)) or (is_picture and self.shape[2] != 3):
            return f"{list(self.shape)} is no shape of a {self.kind}; make it by the functions of core.graph.form"
        if self.nbytes > MAX_FORM_BYTES:
            return f"a value of up to {self.nbytes} bytes is too large; give sides that make at most {MAX_FORM_BYTES}"
        return ""

    def why_not(self, shape: Sequence[int], dtype: str) -> str:
        """Why an array is no such value; "": it is one."""
        if dtype != self.dtype:
            return f"it is {dtype}, and {self.dtype} is declared"
        exact = len(shape) if self.kind != "picture" else 2  # a picture has three channels
        fits = len(shape) == len(self.shape) and all(side <= most for side, most in zip(shape, self.shape, strict=True))
        if not fits or tuple(shape[exact:]) != self.shape[exact:]:
            return f"its shape is {list(shape)}, and {self} is declared"
        return ""

    @property
    def is_plain(self) -> bool:
        """Whether its values are Python's bool, int, float or str, not arrays."""
        return self.kind in _PLAIN_TYPES

    def why_not_plain(self, value: object) -> str:
        """Why a value is not Python's bool, int, float or str of this form; "": it is. An int is a number, a bool is no
        int, and numbers are finite.
        """
        if not isinstance(value, _PLAIN_TYPES.get(self.kind, ())) or (self.kind != "truth" and isinstance(value, bool)):
            return f"it is a {type(value).__name__}, and {self} is declared"
        if isinstance(value, str):
            return self._why_not_text(value)
        if self.kind == "integer" and isinstance(value, int) and not _LEAST_INTEGER <= value <= _MOST_INTEGER:
            return "it is no integer of 64 bits"
        return "it is no finite number" if isinstance(value, int | float) and not _is_finite(value) else ""

    def _why_not_text(self, value: str) -> str:
        try:
            nbytes = len(value.encode())
        except UnicodeEncodeError as error:
            return f"it is no text in UTF-8: {error.reason}"
        return self.why_not((nbytes,), "uint8")

    def why_not_from(self, made: Form) -> str:
        """Why a port of this form does not take all that a port of another form makes; "": it does."""
        if made.kind != self.kind:
            return f"it takes {self}, and gets {made}"
        return self.why_not(made.shape, made.dtype) and f"it takes {self}, and gets {made}"

    def __str__(self) -> str:
        if self.kind == "tensor":
            return f"tensor {self.dtype} up to {list(self.shape)}"
        if self.kind == "text":
            return f"text of up to {self.size} bytes"
        return f"picture of up to {self.shape[1]} x {self.shape[0]} px" if self.kind == "picture" else self.kind


def _is_finite(value: float) -> bool:
    try:
        return isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


TRUTH, INTEGER, NUMBER = Form("truth"), Form("integer"), Form("number")


def text(most_bytes: int) -> Form:
    """Text of at most so many bytes in UTF-8."""
    return Form("text", (most_bytes,))


def picture(height: int, width: int) -> Form:
    """A picture, uint8 [height, width, 3], of at most these sides in px."""
    return Form("picture", (height, width, 3))


def tensor(dtype: str, *shape: int) -> Form:
    """A tensor. dtype: one of TENSOR_BYTES. shape: the greatest length of each side."""
    return Form("tensor", shape, dtype)
