"""CUDA graphs of a model's steps: turned on and off for comparisons, and what they have cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.gpu.report import Figures
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.models.unet.unet import Unet

Call = Callable[[], object]


@dataclass
class GraphChoice:
    """Whether this run may use CUDA graphs. A section that fails with them turns them off for all that follow."""

    are_on: bool = True


def model_options(choice: GraphChoice) -> dict[str, Any]:
    """The fields of a ModelConfig that say so."""
    return {"cuda_graphs": "auto" if choice.are_on else "off"}


def as_graph(name: str) -> str:
    """The name of a step where it is replayed."""
    return f"{name} as a graph"


class GraphSwitch:
    """Turns the graphs of a denoiser or UNet on and off."""

    def __init__(self, model: Denoiser | Unet, choice: GraphChoice) -> None:
        self._graphs, self._choice, self._can_capture = model.graphs, choice, model.graphs.enabled
        self.set(True)

    @property
    def works(self) -> bool:
        """Whether steps can be captured: the model has graphs, and the run may use them."""
        return self._can_capture and self._choice.are_on

    def set(self, is_on: bool) -> None:
        """Have steps captured and replayed, if they can be, or computed eagerly."""
        self._graphs.enabled = is_on and self._choice.are_on

    def eager(self, call: Call) -> Call:
        """A call whose steps are computed eagerly."""
        return partial(self._call, call, False)

    def replayed(self, call: Call) -> Call:
        """A call whose steps are replayed as graphs; its first steps of a shape warm it and capture it."""
        return partial(self._call, call, True)

    def both(self, eager: Mapping[str, Call], captured: Iterable[str]) -> dict[str, Call]:
        """These steps eagerly, and those of them that are named in `captured` also as graphs, if there are graphs. A
        shape's first step warms kernels, the second is captured: both have run."""
        replayed = {as_graph(name): self.replayed(eager[name]) for name in captured if self.works}
        for call in replayed.values():
            call()
            call()
        return {name: self.eager(call) for name, call in eager.items()} | replayed

    def _call(self, call: Call, is_on: bool) -> object:
        self.set(is_on)
        return call()

    def clear(self) -> None:
        """Drop all graphs, as of a model that was just loaded."""
        self._graphs.clear()

    def figures(self) -> Figures:
        """The cost of captures since the model was made; empty without any."""
        stats = self._graphs.stats
        if not stats.captures:
            return {}
        return {
            "captures": stats.captures,
            "replays": stats.replays,
            "failed": stats.failed,
            "capture_ms": 1e3 * stats.capture_seconds / stats.captures,
            "pool_gb": self._graphs.taken_bytes / 1e9,
        }
