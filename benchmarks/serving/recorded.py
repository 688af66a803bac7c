"""Scheduling policies that write down what they are shown: requests as they reach the engine, batches as they end.

For `--scheduling-policy benchmarks.serving.recorded:Default` and so on; the file is named by the environment of the
server. Every record is a line of JSON; what they mean: `Batch`, `Arrival`, `Loading`.
"""

from __future__ import annotations

import base64
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import msgspec

from benchmarks.baselines.monoliths import Monoliths, Pool
from core.handles import ModelKey
from core.messages.codec import MessageDecoder, encode
from core.messages.engine import EngineRequest
from core.messages.worker import Batch as SentBatch
from core.messages.worker import BatchResult
from core.scheduling.dispatch import Decision, Dispatch, Loads
from core.scheduling.model_demand import ModelDemand
from core.scheduling.policies import make_policy, policy_class
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.requests.request import Request
from core.scheduling.view import View

FILE = "STENCIL_POLICY_RECORD"
"""Environment variable: the file to append to."""

POOLS = "STENCIL_POOLS"
"""Environment variable: the pools of `ServedMonoliths`, as JSON."""

CLOCKWORK = "benchmarks.baselines.clockwork:Clockwork"
FORMER_GOODPUT = "benchmarks.baselines.former.goodput:Goodput"
FORMER_ELASTIC = "benchmarks.baselines.former.elastic:Elastic"
MONOLITHS = "benchmarks.serving.recorded:ServedMonoliths"


class Arrival(msgspec.Struct, frozen=True, tag="arrival"):
    """A request has reached an engine."""

    head: str  # the EngineRequest, as base64 of its message
    now: float  # seconds of CLOCK_MONOTONIC
    engine: int  # id of its process

    @property
    def request(self) -> EngineRequest:
        return _DECODER.decode(base64.b64decode(self.head))


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """A rank's part of a batch has ended. Times are seconds of CLOCK_MONOTONIC."""

    rank: int
    op: str
    requests: tuple[str, ...]  # ids; none for work of the activation cache
    sent: float | None  # None: not known
    started: float
    seconds: float
    degree: int  # number of ranks that computed it together
    # CPU seconds of the engine's process since it started: all of them, and those of the policy alone.
    engine_cpu: float
    policy_cpu: float

    @property
    def ended(self) -> float:
        return self.started + self.seconds

    def has_next(self, following: Batch) -> bool:
        """Whether the next batch of its rank had been sent when this one ended."""
        return following.sent is None or following.sent <= self.ended


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """What a rank is loading, after its policy has decided about loads; written when it has changed."""

    rank: int
    now: float  # seconds of CLOCK_MONOTONIC
    keys: tuple[ModelKey, ...]


_DECODER: MessageDecoder[EngineRequest] = MessageDecoder(EngineRequest)


def read(path: Path) -> tuple[list[Arrival], list[Batch]]:
    """The records of a file, in the order of time."""
    lines = _lines(path)
    batches = [line for line in lines if isinstance(line, Batch)]
    return [line for line in lines if isinstance(line, Arrival)], sorted(batches, key=lambda batch: batch.started)


def read_loading(path: Path) -> list[Loading]:
    """What ranks were loading, in the order of time."""
    return [line for line in _lines(path) if isinstance(line, Loading)]


def _lines(path: Path) -> list[Arrival | Batch | Loading]:
    return [msgspec.json.decode(line, type=Arrival | Batch | Loading) for line in path.read_bytes().splitlines()]


def successive(batches: Sequence[Batch]) -> Iterator[tuple[Batch, Batch]]:
    """Each batch with the next one of its rank."""
    by_rank = defaultdict[int, list[Batch]](list)
    for batch in batches:
        by_rank[batch.rank].append(batch)
    for of_rank in by_rank.values():
        yield from pairwise(of_rank)


class Recorded(SchedulingPolicy):
    """Asks another policy. Subclasses name it."""

    inner: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.spreads_models = policy_class(cls.inner).spreads_models

    def __init__(self) -> None:
        self._policy = make_policy(self.inner)
        # Unbuffered: lines of several engines stay whole. Open as long as its process.
        self._file = Path(os.environ[FILE]).open("ab", buffering=0)  # noqa: SIM115
        self._cpu = 0.0
        self._loading: dict[int, list[ModelKey]] = {}  # rank -> what it is loading
        self._sent: defaultdict[tuple[str, str], deque[float]] = defaultdict(deque)  # (request, node) -> times

    def loads(self, demand: ModelDemand, now: float) -> Loads:
        decided = self._policy.loads(demand, now)
        residency = demand.residency
        for rank in (rank for ranks in residency.sets for rank in ranks):
            orders = (load.load for load in decided.loads if rank in load.ranks)
            keys = sorted(residency.awaited((rank,)).union(*orders), key=lambda key: (key.component, key.content))
            if keys != self._loading.get(rank, []):
                self._loading[rank] = keys
                self._write(Loading(rank, time.monotonic(), tuple(keys)))
        return decided

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        before = time.thread_time()
        decisions = self._policy.choose(view, now)
        self._cpu += time.thread_time() - before
        for request, node in _items(decisions):
            self._sent[request.id, node].append(now)
        return decisions

    def page_rank(self, template: str, ranks: Sequence[int]) -> int:
        return self._policy.page_rank(template, ranks)

    def on_arrival(self, request: Request) -> None:
        self._write(Arrival(base64.b64encode(encode(request.head)).decode(), time.monotonic(), os.getpid()))
        self._policy.on_arrival(request)

    def on_result(self, batch: SentBatch, result: BatchResult) -> None:
        places = [(item.request_id, item.node) for item in batch.items]
        sent = [self._sent[place].popleft() for place in places if self._sent[place]]
        ids = tuple(name for name, _ in places) if sent else ()
        for rank in batch.ranks:
            self._write(
                Batch(
                    rank=rank,
                    op=batch.op,
                    requests=ids,
                    sent=max(sent, default=None),
                    started=result.started,
                    seconds=result.seconds,
                    degree=len(batch.ranks),
                    engine_cpu=time.process_time(),
                    policy_cpu=self._cpu,
                )
            )
        self._policy.on_result(batch, result)

    def on_end(self, request_id: str) -> None:
        self._policy.on_end(request_id)
        for place in [place for place in self._sent if place[0] == request_id and not self._sent[place]]:
            del self._sent[place]

    def _write(self, line: Arrival | Batch | Loading) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")


def _items(decisions: Sequence[Decision]) -> Iterator[tuple[Request, str]]:
    for decision in decisions:
        if isinstance(decision, Dispatch):
            yield from ((request, node.name) for request, node in decision.items)


class Default(Recorded):
    """`default`."""

    inner = "default"


class FormerGoodput(Recorded):
    """A policy before `default`, for objectives."""

    inner = FORMER_GOODPUT


class FormerElastic(Recorded):
    """A policy before `default`, for large requests on several ranks."""

    inner = FORMER_ELASTIC


class Clockwork(Recorded):
    """Clockwork on equal ranks."""

    inner = CLOCKWORK


class ServedMonoliths(Monoliths):
    """Whole workflows as units, in a server whose environment names the pools."""

    def __init__(self) -> None:
        super().__init__(msgspec.json.decode(os.environ[POOLS], type=list[Pool]))


class WholeWorkflows(Recorded):
    """ServedMonoliths."""

    inner = MONOLITHS
