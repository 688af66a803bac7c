"""CUDA graphs of denoising steps: the host launches all kernels of a step at once.

Launching a FLUX step's kernels one by one can take longer than running them. When a shape comes for the second time,
its pass runs as it is, and is captured right after: what a capture cannot do (compile kernels, choose plans, upload
tables) has then been done, and while the host captures, the device is at work. Later steps of that shape copy their
contents to the addresses that the graph reads, and replay it. The results are those of the same pass, bit for bit.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from core.ipc.logs import of_request
from model_executor.device_failures import is_out_of_memory
from model_executor.graphs.static_rows import StaticRows, key_of
from model_executor.kernels.held import holding
from model_executor.models.base import Row

logger = logging.getLogger("stencil.worker")

MAX_GRAPHS = 24
"""Graphs that a denoiser keeps; the least recently replayed one goes first. One of a FLUX step has some 600 nodes."""

MAX_SHAPES = 256
"""Shapes that are remembered: those that came once, and those whose pass does what cannot be captured."""

Forward = Callable[[Sequence[Row]], list[Tensor]]
"""A pass over rows, which neither waits for the device nor reads what a tensor contains."""


class Graph(Protocol):
    """Work that was captured on a device."""

    def replay(self) -> None:
        """Queue the work again, with whatever its inputs now contain."""


class Capture(Protocol):
    """Captures the work that a function queues, on one device."""

    def __call__(self, run: Callable[[], list[Tensor]]) -> tuple[Graph, list[Tensor]]:
        """The graph of this function's work, which does not run yet, and the tensors that it writes. Raises
        RuntimeError if it cannot be captured."""

    @property
    def is_broken(self) -> bool:
        """Whether a capture could not be ended, after which no other may begin."""

    @property
    def taken_bytes(self) -> int:
        """Device memory taken by the graphs there are."""

    def forget(self) -> None:
        """All graphs are gone: the memory that they shared may be freed."""


@dataclass
class GraphStats:
    """Counts since the start. capture_seconds: of all captures together."""

    captures: int = 0
    replays: int = 0
    failed: int = 0
    capture_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    rows: StaticRows  # what it reads
    outputs: list[Tensor]  # what it writes; a later replay of any graph may overwrite them
    held: list[Tensor]  # cached tensors that it reads


class StepGraphs:
    """The graphs of one denoiser, by shape of the step."""

    def __init__(self, capture: Capture | None) -> None:
        """capture: None where there are no graphs, as on a CPU."""
        self._capture, self._is_wanted = capture, True
        self.stats = GraphStats()
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._refused: OrderedDict[Hashable, None] = OrderedDict()

    @property
    def enabled(self) -> bool:
        """Whether steps are captured and replayed."""
        return self._is_wanted and self._capture is not None

    @enabled.setter
    def enabled(self, is_wanted: bool) -> None:
        self._is_wanted = is_wanted

    @property
    def taken_bytes(self) -> int:
        """Device memory taken by the graphs there are."""
        return 0 if self._capture is None else self._capture.taken_bytes

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, rows: Sequence[Row], num_active: int | None, forward: Forward) -> list[Tensor]:
        """What `forward` gives for the rows of one request, in tensors that are the caller's. num_active: to which
        their active tokens are filled up, with repetitions of the last one, so that masks of similar size share a
        graph; None for rows without.

        Only for rows that `is_repeatable`.
        """
        key = key_of(rows, num_active)
        if not self.enabled or key in self._refused:
            return forward(rows)
        captured = self._graphs.get(key)
        if captured is not None:
            self._graphs.move_to_end(key)
            captured.rows.take(rows)
            captured.graph.replay()
            self.stats.replays += 1
            return _own_part(captured.outputs, rows, is_copied=True)
        static = StaticRows(rows, num_active)
        static.take(rows)
        outputs = forward(static.rows)
        if key in self._seen:  # what a pass finds in caches is there now, and the device is busy meanwhile
            self._add(key, static, forward)
        _note(self._seen, key)
        return _own_part(outputs, rows, is_copied=False)

    def clear(self) -> None:
        """Drop all graphs; their shapes may be captured again. Refused shapes stay refused: their passes do what cannot
        be captured, however much memory there is."""
        self._graphs.clear()
        self._seen.clear()
        if self._capture is not None:
            self._capture.forget()

    def _add(self, key: Hashable, static: StaticRows, forward: Forward) -> None:
        """Capture the pass over these rows. After a failure it is not tried again for this shape, unless memory ran
        out; then all graphs are dropped. What cannot be undone turns graphs off."""
        assert self._capture is not None
        while len(self._graphs) >= MAX_GRAPHS:
            self._graphs.popitem(last=False)
        started, held = time.monotonic(), list[Tensor]()
        try:
            with holding(held):
                graph, outputs = self._capture(lambda: forward(static.rows))
        except RuntimeError as error:
            self.stats.failed += 1
            self._give_up(key, error)
            return
        self.stats.captures += 1
        self.stats.capture_seconds += time.monotonic() - started
        self._graphs[key] = _Captured(graph, static, outputs, held)

    def _give_up(self, key: Hashable, error: RuntimeError) -> None:
        assert self._capture is not None
        logger.warning("a step is not captured as a CUDA graph, and runs as it is: %s", error, extra=of_request(""))
        if self._capture.is_broken:
            logger.error("no step is captured any more, since a capture could not be ended", extra=of_request(""))
            self.clear()
            self._capture = None
        elif is_out_of_memory(error):
            self.clear()
        else:
            _note(self._refused, key)


def _note(shapes: OrderedDict[Hashable, None], key: Hashable) -> None:
    shapes[key] = None
    shapes.move_to_end(key)
    while len(shapes) > MAX_SHAPES:
        shapes.popitem(last=False)


def _own_part(outputs: Sequence[Tensor], rows: Sequence[Row], *, is_copied: bool) -> list[Tensor]:
    """The outputs without those of repeated tokens."""
    parts = [x if row.active is None else x[: len(row.active)] for x, row in zip(outputs, rows, strict=True)]
    return [part.clone() for part in parts] if is_copied else parts
