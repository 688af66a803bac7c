"""A hypothesis strategy for Python and NumPy values of every kind that a caller may pass as a field."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst


class Name(enum.StrEnum):
    A = "a"


class Number(enum.IntEnum):
    ONE = 1


integers = st.one_of(
    st.integers(-2, 300),
    st.integers(),
    st.sampled_from([0, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**400, Number.ONE]),
    # Made only when drawn: hypothesis may print its strategies, and Python refuses to print an integer this long.
    st.just(5000).map(lambda digits: -(10**digits)),
)
numpy_scalars = st.one_of(
    *(npst.from_dtype(np.dtype(kind)) for kind in ("bool", "u1", "i2", "i8", "u8", "f2", "f4", "f8", "c16", "M8[s]")),
    st.sampled_from([np.str_("a"), np.bytes_(b"a"), np.longdouble(1), np.longdouble("inf"), np.timedelta64(3, "s")]),
)
text = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "\ud83d", "a\0b", "none", "auto", Name.A]),
    st.just(40_000).map(lambda length: "x" * length),  # as above: a long string in a strategy is a warning when printed
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    st.floats(),
    st.floats(0, 1),
    text,
    st.binary(max_size=8),
    numpy_scalars,
    st.complex_numbers(),
    st.sampled_from([decimal.Decimal(1), fractions.Fraction(1, 2), datetime.timedelta(1), object(), int, ..., len]),
    st.sampled_from([Path("nowhere"), np.zeros((), np.int64), np.zeros(3), np.zeros((8, 8, 3), np.uint8)]),
)
values = st.one_of(
    scalars,
    st.tuples(scalars, scalars),
    st.lists(scalars, max_size=3),
    st.dictionaries(st.one_of(st.integers(), st.text(max_size=3)), scalars, max_size=2),
    st.sets(st.integers(), max_size=2),
)


def objects(kind: type, fields: tuple[str, ...]) -> st.SearchStrategy[object]:
    """Calls of a class with arbitrary values in up to three of its fields: (class, arguments)."""
    return st.dictionaries(st.sampled_from(fields), values, min_size=1, max_size=3).map(lambda given: (kind, given))
