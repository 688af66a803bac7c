"""Bar: a figure over several contests, and what it should reach."""

from __future__ import annotations

from typing import NamedTuple


class Bar(NamedTuple):
    """least, most: what the value should reach, or not exceed; both None: it is printed alone. interval: half of its
    95 % confidence interval; None: it has none.
    """

    name: str
    value: float
    least: float | None = None
    most: float | None = None
    interval: float | None = None

    @property
    def is_met(self) -> bool:
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    @property
    def text(self) -> str:
        value = f"{self.value:.0f}" if self.value >= 100 else f"{self.value:.3f}"
        if self.interval is not None:
            value += f" +- {self.interval:.2g}"
        if self.least is None and self.most is None:
            return f"{self.name}: {value}"
        target = f"at most {self.most:g}" if self.least is None else f"at least {self.least:g}"
        return f"{self.name}: {value} ({target}: {'met' if self.is_met else 'NOT met'})"
