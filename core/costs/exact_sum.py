"""ExactSum: a sum of floats from which terms can be removed again without leaving a rounding error."""

from __future__ import annotations

from math import ldexp

FRACTION_BITS = 60
"""Terms count as multiples of 2 ** -FRACTION_BITS: the rest, less than 1e-18, is dropped."""


class ExactSum:
    """A sum kept as an integer, so that it does not depend on the order of additions and removals: after any number of
    them it is what the remaining terms sum up to, and 0 without terms. Terms must be finite.
    """

    __slots__ = ("_units",)

    def __init__(self) -> None:
        self._units = 0

    def add(self, term: float) -> None:
        self._units += int(ldexp(term, FRACTION_BITS))

    def remove(self, term: float) -> None:
        """Remove a term that was added."""
        self._units -= int(ldexp(term, FRACTION_BITS))

    def __float__(self) -> float:
        return self._units / (1 << FRACTION_BITS)
