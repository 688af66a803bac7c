"""Durations: how long a simulated rank takes for what it is sent; Latencies: tables by op, degree and size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from core.costs.latency_table import interpolated
from core.graph.op import OPS
from core.graph.work import Work
from core.graph.workflow import Workflow
from core.handles import ModelKey
from core.messages.engine import EngineRequest
from core.messages.worker import Batch, Delivery, Item, PageCopy, Transfer
from core.scheduling.requests.request import NodeSizes


class Durations(ABC):
    """Base class. All results are seconds; by default only batches take any."""

    @abstractmethod
    def batch_seconds(self, batch: Batch, work: Work) -> float:
        """From when all ranks of a batch have begun it until it ends on all of them. work: its size, see
        `batch_work`.
        """

    def crowded_seconds(self, batch: Batch, seconds: float, num_others: int) -> float:
        """How much longer a batch of so many seconds takes as other ranks have work when it begins."""
        return 0.0

    def pause_seconds(self) -> float:
        """From the end of a batch until its ranks begin what they were sent before."""
        return 0.0

    def transfer_seconds(self, transfer: Transfer) -> float:
        """To write a value to shared memory; its source does nothing else meanwhile."""
        return 0.0

    def delivery_seconds(self, delivery: Delivery) -> float:
        """From when the source has a value until the rank that it is sent to has it."""
        return 0.0

    def trip_seconds(self) -> float:
        """From when a plan is sent until a rank that has nothing to do begins it."""
        return 0.0

    def copy_seconds(self, copy: PageCopy) -> float:
        """To copy an entry of the activation cache, without the wait for earlier copies."""
        return 0.0

    def load_seconds(self, key: ModelKey) -> float:
        """To load a component, without the wait for the loads before it on its rank."""
        return 0.0

    def load_slowness(self) -> float:
        """What a batch takes while its rank loads a component, as a multiple of what it takes otherwise; at least 1."""
        return 1.0

    def start_seconds(self) -> float:
        """From when a dead rank's process is started again until it accepts plans, with its first model loaded."""
        return 0.0


class Latencies:
    """Measured or published latencies of several kinds of work."""

    def __init__(self, points: Mapping[tuple[str, int], Mapping[float, float]]) -> None:
        """points: (kind of work, degree) -> size -> seconds. Raises ValueError where one has no size, or a size that is
        not above 0.
        """
        self._points = {key: sorted(by_size.items()) for key, by_size in points.items()}
        for key, line in self._points.items():
            if not line or line[0][0] <= 0:
                raise ValueError(f"{key} needs latencies at one or more sizes above 0, not {line}")

    def seconds(self, kind: str, degree: int, size: float) -> float:
        """See `interpolated`. Raises KeyError for a kind and degree that are not in the table."""
        return interpolated(self._points[kind, degree], size)


@dataclass(frozen=True)
class TableDurations(Durations):
    """From a table. kind, size: of a batch in it; by default its op and its number of items, `sum(work.queries)` is its
    number of tokens. transfer, delivery, trip: seconds of each.
    """

    table: Latencies
    kind: Callable[[Batch, Work], str] = lambda batch, work: batch.op
    size: Callable[[Batch, Work], float] = lambda batch, work: len(batch.items)
    transfer: float = 0.0
    delivery: float = 0.0
    trip: float = 0.0

    def batch_seconds(self, batch: Batch, work: Work) -> float:
        return self.table.seconds(self.kind(batch, work), len(batch.ranks), self.size(batch, work))

    def transfer_seconds(self, transfer: Transfer) -> float:
        return self.transfer

    def delivery_seconds(self, delivery: Delivery) -> float:
        return self.delivery

    def trip_seconds(self) -> float:
        return self.trip


def batch_work(batch: Batch, requests: Mapping[str, EngineRequest], workflows: Mapping[str, Workflow]) -> Work:
    """The size of a batch; nothing for work of the activation cache. requests: all that the engine holds, by id."""
    size, items = OPS[batch.op].size, (item for item in batch.items if item.request_id in requests)
    return sum((size(_sizes(item, requests[item.request_id], workflows)) for item in items), Work((), ()))


def _sizes(item: Item, request: EngineRequest, workflows: Mapping[str, Workflow]) -> NodeSizes:
    canvas = request.spec.canvas(workflows[request.workflow].node(item.node).canvas)
    is_masked = getattr(item.work, "active", None) is not None
    tokens = canvas.num_active_tokens if is_masked else canvas.num_all_tokens
    return NodeSizes(canvas, request.spec.num_rows, tokens, request.spec.num_paged_reference_tokens)
