"""Bar: a figure over several contests, and what it should reach."""

from __future__ import annotations

from typing import NamedTuple


class Bar(NamedTuple):
    """least: what the value should reach; None: it is printed alone."""

    name: str
    value: float
    least: float | None = None

    @property
    def is_met(self) -> bool:
        return self.least is None or self.value >= self.least

    @property
    def text(self) -> str:
        value = f"{self.value:.0f}" if self.value >= 100 else f"{self.value:.3f}"
        if self.least is None:
            return f"{self.name}: {value}"
        return f"{self.name}: {value} (at least {self.least:g}: {'met' if self.is_met else 'NOT met'})"
