"""What an engine's loop costs by its number of ranks and of waiting requests: CPU time per completed node.

A real EngineCore, its scheduler, load reports, and encoded plans, results and outputs; the ranks are fakes that answer
in random order. Every rank has up to SLOTS requests, and as many as named wait all the time.
"""

from __future__ import annotations

import asyncio
import cProfile
import heapq
import pstats
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import msgspec

from benchmarks.command import command
from benchmarks.report import Value, percentile, print_line
from benchmarks.simulation.engine import Ranks
from benchmarks.simulation.machine import Machine
from benchmarks.simulation.scenario import MODEL, REFERENCE, make_trace
from core.config import SchedulerConfig
from core.graph.workflow import Node
from core.messages.codec import MessageDecoder, encode
from core.messages.engine import EngineOutputs, EngineRequest, FromEngine, ToEngine
from core.messages.plan_parts import parts_of
from core.messages.worker import Batch, BatchResult, FromWorker, StepPlan
from core.scheduling.dispatch import Decision, Dispatch
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.request import Request
from core.scheduling.scheduler import StepScheduler
from core.scheduling.view import View
from engine.engine_core.engine_core import EngineCore

SLOTS = 4
"""Requests of a rank."""
STEPS = (8, 20, 28, 50)


class LeastWork(SchedulingPolicy):
    """Gives each request the rank with the least work, and runs what is ready of a rank's requests together. Looks only
    at ranks of which something has ended or begun.
    """

    def __init__(self, num_ranks: int) -> None:
        self._waiting: deque[Request] = deque()
        self._ranks: dict[str, int] = {}  # request id -> its rank
        self._requests: list[dict[str, Request]] = [{} for _ in range(num_ranks)]
        self._work = [0] * num_ranks  # rounds of all its requests
        self._least = [(0, rank) for rank in range(num_ranks)]  # a heap of (work, rank); entries may be out of date
        self._changed: set[int] = set()  # ranks

    def on_arrival(self, request: Request) -> None:
        self._waiting.append(request)

    def on_result(self, batch: Batch, result: BatchResult) -> None:
        self._changed.update(batch.ranks)

    def on_end(self, request_id: str) -> None:
        rank = self._ranks.pop(request_id, None)
        if rank is not None:
            self._add_work(rank, -sum(self._requests[rank].pop(request_id).head.rounds))

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        self._place()
        changed, self._changed = self._changed & view.open_ranks, set()
        return [decision for rank in sorted(changed) for decision in self._decisions(rank, view)]

    def _place(self) -> None:
        while self._waiting and (rank := self._least_busy()) is not None:
            request = self._waiting.popleft()
            if request.is_live:
                self._ranks[request.id] = rank
                self._requests[rank][request.id] = request
                self._add_work(rank, sum(request.head.rounds))

    def _least_busy(self) -> int | None:
        """The rank with the least work of those that have a free slot."""
        while self._least:
            work, rank = self._least[0]
            if work == self._work[rank] and len(self._requests[rank]) < SLOTS:
                return rank
            heapq.heappop(self._least)
        return None

    def _add_work(self, rank: int, rounds: int) -> None:
        self._work[rank] += rounds
        self._changed.add(rank)
        heapq.heappush(self._least, (self._work[rank], rank))

    def _decisions(self, rank: int, view: View) -> Iterator[Dispatch]:
        batches: dict[tuple[str, str], list[tuple[Request, Node]]] = {}
        for request in self._requests[rank].values():
            for node in view.ready(request):
                if view.can_run(request, node, (rank,)):
                    batches.setdefault((request.head.model, node.op), []).append((request, node))
        for items in batches.values():
            yield Dispatch(tuple(items), (rank,))


class FakeRanks:
    """Takes plans as an Executor does, and answers what it is asked to."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.plans: list[deque[StepPlan]] = [deque() for _ in range(num_ranks)]

    def submit(self, plan: StepPlan) -> None:
        for rank, part in parts_of(plan, self._num_ranks).items():
            encode(part)
            if part.batches:
                self.plans[rank].append(part)

    def kill(self, rank: int) -> None:
        raise AssertionError("a fake rank is never late")

    def answer(self, random: Random) -> list[BatchResult]:
        """The results of a plan of any rank that has one."""
        busy = [rank for rank, plans in enumerate(self.plans) if plans]
        rank = random.choice(busy)
        plan = self.plans[rank].popleft()
        return [BatchResult(b.id, rank, 0.0, 0.05, Ranks().run(b, rank)) for b in plan.batches]


class Loop:
    """An EngineCore between clients and fake ranks."""

    def __init__(self, num_ranks: int, num_waiting: int) -> None:
        self._random = Random(0)
        self._ranks = FakeRanks(num_ranks)
        config = SchedulerConfig(max_num_seqs=SLOTS)
        policy = LeastWork(num_ranks)
        scheduler = StepScheduler(config, {MODEL.name: MODEL}, num_ranks, policy=policy)
        scheduler.learn(Machine(text_encode=0.01, image_encode=0.01, decode=0.02).samples(MODEL.name))
        self._core = EngineCore(scheduler, self._ranks, self._emit)
        self._to_engine: MessageDecoder[ToEngine] = MessageDecoder(ToEngine)
        self._from_worker: MessageDecoder[FromWorker] = MessageDecoder(FromWorker)
        self._requests = _requests()
        self._num_ended = num_ranks * SLOTS + num_waiting  # that a new request is sent for

    def _emit(self, message: FromEngine) -> None:
        encode(message)
        if isinstance(message, EngineOutputs):
            self._num_ended += len(message.outputs)

    async def turn(self, results: Sequence[BatchResult]) -> float:
        """One turn of the engine's loop, with these results and a new request for each that has ended; CPU seconds."""
        answers = [encode(result) for result in results]
        requests = [encode(next(self._requests)) for _ in range(self._num_ended)]
        self._num_ended = 0
        start = time.thread_time()
        for payload in answers:
            self._core.mailbox.put_nowait(self._from_worker.decode(payload))
        for payload in requests:
            self._core.mailbox.put_nowait(self._to_engine.decode(payload))
        await asyncio.sleep(0)  # the engine's task runs until it waits for a message again
        seconds = time.thread_time() - start
        assert self._core.mailbox.empty(), "the engine's task has ended, or waits for something else"
        return seconds

    async def run(self, num_nodes: int, profile: cProfile.Profile | None) -> list[tuple[float, int]]:
        """(CPU seconds, completed nodes) of each turn, until so many nodes have ended; every slot is taken before."""
        task = asyncio.create_task(self._core.run())
        await asyncio.sleep(0)
        await self.turn(())
        for _ in range(3 * len(self._ranks.plans)):
            await self.turn(self._ranks.answer(self._random))
        turns = list[tuple[float, int]]()
        if profile is not None:
            profile.enable()
        while sum(nodes for _, nodes in turns) < num_nodes:
            results = self._ranks.answer(self._random)
            turns.append((await self.turn(results), sum(len(result.items) for result in results)))
        if profile is not None:
            profile.disable()
        task.cancel()
        return turns


def _requests() -> Iterator[EngineRequest]:
    """Exact edits of different lengths, so that they do not end together."""
    random = Random(1)
    for edit in make_trace(replace(REFERENCE, num_edits=20_000), 0):
        rounds = random.choice(STEPS)
        spec = msgspec.structs.replace(edit.spec, is_mask_aware=False)
        yield msgspec.structs.replace(edit, spec=spec, rounds=(rounds,))


def measure(num_ranks: int, num_waiting: int, num_nodes: int, profile: cProfile.Profile | None) -> dict[str, Value]:
    turns = asyncio.run(Loop(num_ranks, num_waiting).run(num_nodes, profile))
    by_node = [1e6 * seconds / nodes for seconds, nodes in turns]
    mean = 1e6 * sum(seconds for seconds, _ in turns) / sum(nodes for _, nodes in turns)
    return {
        "benchmark": "scheduler_scale",
        "ranks": num_ranks,
        "waiting": num_waiting,
        "mean_us": mean,
        "p99_us": percentile(by_node, 0.99),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256], help="numbers of ranks")
    parser.add_argument("--waiting", type=int, nargs="+", default=[50, 500, 5000], help="numbers of waiting requests")
    parser.add_argument("--nodes", type=int, default=10_000, help="nodes that are timed in each case")
    parser.add_argument("--profile", action="store_true", help="show the functions that take longest")
    args = parser.parse_args(argv)
    profile = cProfile.Profile() if args.profile else None
    results = [
        measure(num_ranks, num_waiting, args.nodes, profile) for num_ranks in args.ranks for num_waiting in args.waiting
    ]
    print("CPU microseconds per completed node")
    print("ranks  waiting    mean     P99")
    for result in results:
        print(f"{result['ranks']:>5}  {result['waiting']:>7}  {result['mean_us']:>6.0f}  {result['p99_us']:>6.0f}")
    for result in results:
        print_line(result, args.output)
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
