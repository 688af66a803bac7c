"""CUDA graphs of a model's steps: turned on and off for comparisons, and what they have cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from benchmarks.gpu.report import Figures
from core.config import ModelConfig

Call = Callable[[], object]


class Stats(Protocol):
    """Counts since the model was made. capture_seconds: of all captures; pool_bytes: memory that graphs hold now."""

    captures: int
    replays: int
    failed: int
    capture_seconds: float
    pool_bytes: int


class Graphs(Protocol):
    """The part of a denoiser's graphs that is used here."""

    enabled: bool
    stats: Stats

    def clear(self) -> None: ...


@dataclass
class GraphChoice:
    """Whether this run may use CUDA graphs. A section that fails with them turns them off for all that follow."""

    are_on: bool = True


def model_options(choice: GraphChoice) -> dict[str, Any]:
    """The fields of a ModelConfig that say so."""
    if "cuda_graphs" not in ModelConfig.__struct_fields__:
        return {}
    return {"cuda_graphs": "auto" if choice.are_on else "off"}


class GraphSwitch:
    """Turns the graphs of a denoiser or UNet on and off."""

    def __init__(self, model: object, choice: GraphChoice) -> None:
        self._graphs: Graphs | None = getattr(model, "graphs", None)
        self._choice = choice
        self.set(True)

    @property
    def works(self) -> bool:
        """Whether steps can be captured: the model has graphs, and the run may use them."""
        return self._graphs is not None and self._choice.are_on

    def set(self, is_on: bool) -> None:
        """Have steps captured and replayed, if they can be, or computed eagerly."""
        if self._graphs is not None:
            self._graphs.enabled = is_on and self._choice.are_on

    def eager(self, call: Call) -> Call:
        """A call whose steps are computed eagerly."""
        return partial(self._call, call, False)

    def replayed(self, call: Call) -> Call:
        """A call whose steps are replayed as graphs; its first steps of a shape warm it and capture it."""
        return partial(self._call, call, True)

    def _call(self, call: Call, is_on: bool) -> object:
        self.set(is_on)
        return call()

    def clear(self) -> None:
        """Drop all graphs, as of a model that was just loaded."""
        if self._graphs is not None:
            self._graphs.clear()

    def figures(self) -> Figures:
        """What captures have cost since the model was made; empty without any."""
        if self._graphs is None or not self._graphs.stats.captures:
            return {}
        stats = self._graphs.stats
        return {
            "captures": stats.captures,
            "replays": stats.replays,
            "failed": stats.failed,
            "capture_ms": 1e3 * stats.capture_seconds / stats.captures,
            "pool_gb": stats.pool_bytes / 1e9,
        }
