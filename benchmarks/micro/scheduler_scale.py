"""What an engine's loop costs by its number of ranks and of waiting requests: CPU time per completed node.

A real EngineCore with its scheduler, load reports, and encoded plans, results and outputs; the ranks are fakes that
answer in random order, one plan in each turn of the loop. Every rank has SLOTS requests, and as many as named wait all
the time. P99: of the turns, each divided by its nodes.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import msgspec

from benchmarks.command import command
from benchmarks.report import Value, percentile, print_report
from benchmarks.simulation.engine import Ranks
from benchmarks.simulation.machine import Machine
from benchmarks.simulation.scenario import MIX, MODEL, make_trace
from core.config import SchedulerConfig
from core.graph.workflow import Node
from core.messages.codec import MessageDecoder, encode
from core.messages.engine import EngineOutputs, EngineRequest, FromEngine, ToEngine
from core.messages.plan_parts import parts_of
from core.messages.worker import Batch, BatchResult, DropAdapter, FromWorker, LoadAdapter, StepPlan, TransferDone
from core.scheduling.dispatch import Decision, Dispatch
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.requests.request import Request
from core.scheduling.scheduler import StepScheduler
from core.scheduling.view import View
from engine.engine_core.engine_core import EngineCore

SLOTS = 4


class LeastWork(SchedulingPolicy):
    """Gives each request the rank with the least work, and runs together what is ready of a rank's requests. It looks
    only at ranks of which something has begun or ended.
    """

    def __init__(self, num_ranks: int) -> None:
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._requests: list[dict[str, Request]] = [{} for _ in range(num_ranks)]  # per rank: id -> request
        self._rank_of: dict[str, int] = {}
        self._work = [0] * num_ranks  # per rank: rounds of all its requests
        self._free = set(range(num_ranks))  # ranks with a free slot
        self._changed: set[int] = set()  # ranks

    def on_arrival(self, request: Request) -> None:
        self._waiting[request.id] = request

    def on_result(self, batch: Batch, result: BatchResult) -> None:
        self._changed.update(batch.ranks)

    def on_end(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        rank = self._rank_of.pop(request_id, None)
        if rank is not None:
            self._work[rank] -= sum(self._requests[rank].pop(request_id).head.rounds)
            self._free.add(rank)

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        while self._waiting and self._free:
            self._place(self._waiting.popitem(last=False)[1], min(self._free, key=self._work.__getitem__))
        changed, self._changed = self._changed & view.open_ranks, set()
        return [dispatch for rank in sorted(changed) for dispatch in self._dispatches(rank, view)]

    def _place(self, request: Request, rank: int) -> None:
        self._requests[rank][request.id], self._rank_of[request.id] = request, rank
        self._work[rank] += sum(request.head.rounds)
        self._changed.add(rank)
        if len(self._requests[rank]) == SLOTS:
            self._free.remove(rank)

    def _dispatches(self, rank: int, view: View) -> Iterator[Dispatch]:
        batches: dict[str, list[tuple[Request, Node]]] = {}
        for request in self._requests[rank].values():
            for node in view.ready(request):
                if view.can_run(request, node, (rank,)):
                    batches.setdefault(node.op, []).append((request, node))
        for items in batches.values():
            yield Dispatch(tuple(items), (rank,))


class Loop:
    """An EngineCore between clients and fake ranks, to which it is the executor."""

    def __init__(self, num_ranks: int, num_waiting: int) -> None:
        self._random = Random(0)
        self._plans: list[deque[StepPlan]] = [deque() for _ in range(num_ranks)]
        config, policy = SchedulerConfig(max_num_seqs=SLOTS), LeastWork(num_ranks)
        scheduler = StepScheduler(config, {MODEL.name: MODEL}, num_ranks, policy=policy)
        scheduler.learn(Machine(text_encode=0.01, image_encode=0.01, decode=0.02).samples(MODEL.name))
        self._core = EngineCore(scheduler, self, self._emit)
        self._to_engine: MessageDecoder[ToEngine] = MessageDecoder(ToEngine)
        self._from_worker: MessageDecoder[FromWorker] = MessageDecoder(FromWorker)
        self._requests = _requests()
        self._num_due = num_ranks * SLOTS + num_waiting  # requests to be sent

    def submit(self, plan: StepPlan) -> None:
        for rank, part in parts_of(plan).items():
            encode(part)
            if part.batches or part.transfers:
                self._plans[rank].append(part)

    def tell(self, rank: int, message: LoadAdapter | DropAdapter) -> None:
        raise AssertionError("no adapter is loaded")

    def kill(self, rank: int) -> None:
        raise AssertionError("a fake rank is never late")

    def restart(self, rank: int, wait_seconds: float) -> None:
        raise AssertionError("no rank dies")

    async def run(self, num_turns: int) -> list[tuple[float, int]]:
        """(CPU seconds, completed nodes) of each turn, after some that do not count."""
        task = asyncio.create_task(self._core.run())
        await asyncio.sleep(0)
        await self._turn(())
        turns = [await self._turn(self._answer()) for _ in range(3 * len(self._plans) + num_turns)]
        task.cancel()
        return turns[-num_turns:]

    def _emit(self, message: FromEngine) -> None:
        encode(message)
        self._num_due += len(message.outputs) if isinstance(message, EngineOutputs) else 0

    def _answer(self) -> list[BatchResult | TransferDone]:
        """The results of any rank's oldest plan."""
        rank = self._random.choice([rank for rank, plans in enumerate(self._plans) if plans])
        plan = self._plans[rank].popleft()
        moved = [TransferDone(rank, transfer.ref) for transfer in plan.transfers]
        return [*moved, *(BatchResult(each.id, rank, 0.0, 0.05, Ranks().run(each, rank)) for each in plan.batches)]

    async def _turn(self, results: Sequence[BatchResult | TransferDone]) -> tuple[float, int]:
        """The loop with these results and the requests that are due."""
        answers = [encode(result) for result in results]
        requests = [encode(next(self._requests)) for _ in range(self._num_due)]
        self._num_due = 0
        start = time.thread_time()
        for payload in answers:
            self._core.mailbox.put_nowait(self._from_worker.decode(payload))
        for payload in requests:
            self._core.mailbox.put_nowait(self._to_engine.decode(payload))
        await asyncio.sleep(0)  # the engine's task runs until it waits for a message again
        seconds = time.thread_time() - start
        assert self._core.mailbox.empty(), "the engine's task has ended"
        return seconds, sum(len(result.items) for result in results if isinstance(result, BatchResult))


def _requests() -> Iterator[EngineRequest]:
    """Exact edits of different lengths, so that they do not end together."""
    for edit in make_trace(replace(MIX, num_edits=20_000), 0):
        yield msgspec.structs.replace(edit, spec=msgspec.structs.replace(edit.spec, is_mask_aware=False))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256], help="numbers of ranks")
    parser.add_argument("--waiting", type=int, nargs="+", default=[50, 500, 5000], help="numbers of waiting requests")
    parser.add_argument("--turns", type=int, default=2500, help="of the loop, timed in each case")
    args = parser.parse_args(argv)
    rows, result = list[tuple[str, str]](), dict[str, Value]({"benchmark": "scheduler_scale"})
    for ranks, waiting in ((ranks, waiting) for ranks in args.ranks for waiting in args.waiting):
        turns = asyncio.run(Loop(ranks, waiting).run(args.turns))
        mean = 1e6 * sum(seconds for seconds, _ in turns) / sum(nodes for _, nodes in turns)
        p99 = percentile([1e6 * seconds / nodes for seconds, nodes in turns], 0.99)
        rows.append((f"{ranks} ranks, {waiting} waiting", f"mean {mean:4.0f} us, P99 {p99:5.0f} us"))
        result |= {f"{ranks}_{waiting}_mean_us": mean, f"{ranks}_{waiting}_p99_us": p99}
    print_report("CPU time per completed node", rows, result, args.output)


if __name__ == "__main__":
    main()
