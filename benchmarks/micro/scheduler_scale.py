"""What an engine's loop costs by its number of ranks and of waiting requests: CPU time per completed node.

A real EngineCore with its scheduler, load reports, and encoded plans, results and outputs; the ranks are fakes that
answer in random order, one plan in each turn of the loop. Every rank has SLOTS requests, and as many as named wait all
the time. P99: of the turns, each divided by its nodes.

With --policy the requests are small, middle and large ones of one model, or only large ones, a third of them under a
far objective, and what is timed is each pass of a scheduling policy of the engine, or of one that is named by its
import path.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice, product
from random import Random
from statistics import fmean
from typing import NamedTuple

import msgspec

from benchmarks.command import command
from benchmarks.micro.timed_policy import TimedPolicy
from benchmarks.report import Value, percentile, print_report
from benchmarks.simulation.arena.degree_machine import DegreeMachine
from benchmarks.simulation.durations import batch_work
from benchmarks.simulation.engine import Ranks
from benchmarks.simulation.machine import Machine
from benchmarks.simulation.scenario import MIX, MODEL, make_trace
from core.config import SchedulerConfig
from core.graph.workflow import Node
from core.handles import ArrayRef, LoadedComponent, ModelKey, RankIds
from core.messages.codec import MessageDecoder, encode
from core.messages.engine import EngineOutputs, EngineRequest, FromEngine, ToEngine
from core.messages.plan_parts import parts_of
from core.messages.worker import Addition, Batch, BatchResult, FromWorker, Removal, StepPlan, TransferDone
from core.model_info import ModelInfo
from core.scheduling.dispatch import Decision, Dispatch
from core.scheduling.policies import make_policy
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.requests.bindings import ModelKeys
from core.scheduling.requests.request import Request
from core.scheduling.scheduler import StepScheduler
from core.scheduling.view import View
from engine.engine_core.engine_core import EngineCore

SLOTS = 4

SIZES = {64: 0.6, 4096: 0.28, 16384: 0.12}
"""Image tokens of the requests that policies are timed with -> their share."""

BASE_SECONDS = 0.02
"""A step takes so long whatever is in it, so that small requests gain by sharing it."""

AIMED, FAR_SECONDS = 1 / 3, 3600.0
"""The share of them with an objective, and when that is."""


class LeastWork(SchedulingPolicy):
    """Gives each rank that has a free slot the first request of a model that it runs, or else has, and runs together
    what is ready of a rank's requests. It looks only at ranks of which something has begun or ended.
    """

    spreads_models = True

    def __init__(self, num_ranks: int) -> None:
        self._waiting: dict[str, OrderedDict[str, tuple[int, Request]]] = {}  # per model: id -> (number, request)
        self._numbers = count()
        self._models = ModelsOf(num_ranks)
        self._requests: list[dict[str, Request]] = [{} for _ in range(num_ranks)]  # per rank: id -> request
        self._rank_of: dict[str, int] = {}
        self._free = set(range(num_ranks))  # ranks with a free slot
        self._changed: set[int] = set()  # ranks

    def on_arrival(self, request: Request) -> None:
        self._waiting.setdefault(request.head.model, OrderedDict())[request.id] = next(self._numbers), request

    def on_result(self, batch: Batch, result: BatchResult) -> None:
        self._changed.update(batch.ranks)

    def on_end(self, request_id: str) -> None:
        rank = self._rank_of.pop(request_id)
        model = self._requests[rank].pop(request_id).head.model
        self._free.add(rank)
        self._changed.add(rank)
        assert request_id not in self._waiting[model]

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        self._models.look(view, self._waiting)
        for rank in sorted(self._free):
            while rank in self._free and self._place(rank):
                pass
        changed, self._changed = self._changed & view.open_ranks, set()
        return [dispatch for rank in sorted(changed) for dispatch in self._dispatches(rank, view)]

    def _place(self, rank: int) -> bool:
        """Give a rank a request, of a model of its other ones if there is any; False: none of its models has any."""
        running = {request.head.model: None for request in self._requests[rank].values()}
        waiting = self._queues(running) or self._queues(self._models.on(rank))
        if not waiting:
            return False
        _, (_, request) = min(waiting, key=_first).popitem(last=False)
        self._requests[rank][request.id], self._rank_of[request.id] = request, rank
        self._changed.add(rank)
        if len(self._requests[rank]) == SLOTS:
            self._free.remove(rank)
        return True

    def _queues(self, models: Iterable[str]) -> list[OrderedDict[str, tuple[int, Request]]]:
        return [queue for model in models if (queue := self._waiting.get(model))]

    def _dispatches(self, rank: int, view: View) -> Iterator[Dispatch]:
        batches: dict[tuple[ModelKeys, str], list[tuple[Request, Node]]] = {}
        for request in self._requests[rank].values():
            for node in view.ready(request):
                if view.can_run(request, node, (rank,)):
                    batches.setdefault((request.keys_of(node), node.op), []).append((request, node))
        for items in batches.values():
            yield Dispatch(tuple(items), (rank,))


def _first(queue: Mapping[str, tuple[int, Request]]) -> int:
    return next(iter(queue.values()))[0]


class ModelsOf:
    """Which models the ranks have. They keep them, as all models are on some rank."""

    def __init__(self, num_ranks: int) -> None:
        self._on: list[dict[str, None]] = [{} for _ in range(num_ranks)]  # per rank: names of its models
        self._ranks: dict[str, RankIds] = {}  # model -> its ranks

    def look(self, view: View, waiting: Mapping[str, Mapping[str, tuple[int, Request]]]) -> None:
        """Note where the models of waiting requests are, of those that were not seen yet."""
        for model, queue in waiting.items() if len(self._ranks) < len(waiting) else ():
            if queue and model not in self._ranks:
                _, request = next(iter(queue.values()))
                assert request.step_node is not None
                self._ranks[model] = view.ranks_with(request.keys_of(request.step_node))
                for rank in self._ranks[model]:
                    self._on[rank][model] = None

    def on(self, rank: int) -> Iterable[str]:
        return self._on[rank]


class Turn(NamedTuple):
    """One turn of the engine's loop."""

    seconds: float  # of CPU time
    num_nodes: int  # completed
    num_batches: int


class Loop:
    """An EngineCore between clients and fake ranks, to which it is the executor."""

    def __init__(
        self,
        num_ranks: int,
        num_waiting: int,
        num_models: int = 1,
        policy: SchedulingPolicy | None = None,
        sizes: Mapping[int, float] = SIZES,
    ) -> None:
        """num_models: of equal size, of which a third fit on a rank; 1: it fits. policy: None: LeastWork, whose
        requests are all alike. sizes: of the requests of another policy, as SIZES.
        """
        self._random = Random(0)
        self._plans: list[deque[StepPlan]] = [deque() for _ in range(num_ranks)]
        models, num_fit = [_model(index) for index in range(num_models)], -(-num_models // 3)
        nbytes = sum(len(model.components) for model in models[:num_fit])
        config = SchedulerConfig(max_num_seqs=num_ranks * SLOTS, model_bytes=nbytes)
        made = policy or LeastWork(num_ranks)
        scheduler = StepScheduler(config, {each.name: each for each in models}, num_ranks, policy=made)
        self._machine = (
            DegreeMachine(step=BASE_SECONDS) if policy else Machine(text_encode=0.01, image_encode=0.01, decode=0.02)
        )
        loaded = [(rank, _components(models, rank * num_fit, num_fit)) for rank in range(num_ranks)]
        scheduler.learn([sample for model in models for sample in self._machine.samples(model.name)], loaded)
        self._core = EngineCore(scheduler, self, self._emit)
        self._to_engine: MessageDecoder[ToEngine] = MessageDecoder(ToEngine)
        self._from_worker: MessageDecoder[FromWorker] = MessageDecoder(FromWorker)
        requests = _requests([model.name for model in models])
        self._requests = _mixed(requests, sizes) if policy else requests
        self._live: dict[str, EngineRequest] = {}  # by id
        self._workflows = scheduler.workflows
        self._num_due = num_ranks * SLOTS + num_waiting  # requests to be sent

    def submit(self, plan: StepPlan) -> None:
        for rank, part in parts_of(plan).items():
            encode(part)
            if part.batches or part.transfers:
                self._plans[rank].append(part)

    def tell(self, rank: int, message: Addition | Removal) -> None:
        raise AssertionError("no adapter is loaded")

    def kill(self, rank: int) -> None:
        """Do nothing: an answer that a slow policy has delayed comes nevertheless."""

    def restart(self, rank: int, wait_seconds: float) -> None:
        raise AssertionError("no rank dies")

    async def run(self, num_turns: int) -> list[Turn]:
        """Some turns, after some that do not count."""
        task = asyncio.create_task(self._core.run())
        await asyncio.sleep(0)
        await self._turn(())
        turns = [await self._turn(self._answer()) for _ in range(3 * len(self._plans) + num_turns)]
        task.cancel()
        return turns[-num_turns:]

    def _emit(self, message: FromEngine) -> None:
        encode(message)
        if isinstance(message, EngineOutputs):
            self._num_due += len(message.outputs)
            for output in message.outputs:
                self._live.pop(output.request_id, None)

    def _answer(self) -> list[BatchResult | TransferDone]:
        """The results of any rank's oldest plan."""
        rank = self._random.choice([rank for rank, plans in enumerate(self._plans) if plans])
        plan = self._plans[rank].popleft()
        moved = [TransferDone(rank, transfer.ref) for transfer in plan.transfers]
        return [*moved, *(self._result(each, rank) for each in plan.batches)]

    def _result(self, batch: Batch, rank: int) -> BatchResult:
        work = batch_work(batch, self._live, self._workflows)
        seconds = self._machine.batch_seconds(batch, work)
        # It has ended now: a rank whose first batch were over long ago would seem to be overdue with the next one.
        return BatchResult(batch.id, rank, time.monotonic() - seconds, seconds, Ranks().run(batch, rank))

    async def _turn(self, results: Sequence[BatchResult | TransferDone]) -> Turn:
        """The loop with these results and the requests that are due."""
        answers = [encode(result) for result in results]
        heads = list(islice(self._requests, self._num_due))
        self._live |= {head.request_id: head for head in heads}
        requests = [encode(head) for head in heads]
        self._num_due = 0
        start = time.thread_time()
        for payload in answers:
            self._core.mailbox.put_nowait(self._from_worker.decode(payload))
        for payload in requests:
            self._core.mailbox.put_nowait(self._to_engine.decode(payload))
        await asyncio.sleep(0)  # the engine's task runs until it waits for a message again
        seconds = time.thread_time() - start
        assert self._core.mailbox.empty(), "the engine's task has ended"
        sizes = [len(result.items) for result in results if isinstance(result, BatchResult)]
        return Turn(seconds, sum(sizes), len(sizes))


def _model(index: int) -> ModelInfo:
    """A model with components of its own."""
    keys = tuple(ModelKey(str(index), kind) for kind in ("text_encoder", "transformer", "vae"))
    return msgspec.structs.replace(MODEL, name=str(index), components=keys)


def _components(models: Sequence[ModelInfo], first: int, number: int) -> list[LoadedComponent]:
    """The components of some models: of the first one and those after it, which begin again after the last."""
    chosen = [models[(first + index) % len(models)] for index in range(number)]
    return [LoadedComponent(key, 1) for model in chosen for key in model.components]


def _requests(models: Sequence[str]) -> Iterator[EngineRequest]:
    """Exact edits of different lengths, so that they do not end together, of any of these models."""
    random = Random(1)
    for edit in make_trace(replace(MIX, num_edits=20_000), 0):
        spec = msgspec.structs.replace(edit.spec, is_mask_aware=False)
        yield msgspec.structs.replace(edit, model=random.choice(models), spec=spec)


def _mixed(requests: Iterator[EngineRequest], sizes: Mapping[int, float]) -> Iterator[EngineRequest]:
    """These with other sizes. They arrive as they are sent."""
    random = Random(2)
    for edit in requests:
        (tokens,) = random.choices(list(sizes), list(sizes.values()))
        active = ArrayRef(0, 0, (tokens,), "int32")
        spec = msgspec.structs.replace(edit.spec, num_tokens=tokens, active=active)
        now, is_aimed = time.monotonic(), random.random() < AIMED
        yield msgspec.structs.replace(edit, spec=spec, arrival=now, objective=now + FAR_SECONDS if is_aimed else None)


def time_passes(
    name: str, num_ranks: int, num_waiting: int, num_turns: int, sizes: Mapping[int, float] = SIZES
) -> list[float]:
    """CPU seconds of the passes of a policy, of some turns of the loop. sizes: of the requests, as SIZES."""
    policy = TimedPolicy(make_policy(name))
    loop = Loop(num_ranks, num_waiting, policy=policy, sizes=sizes)
    asyncio.run(loop.run(num_turns))
    return policy.passes[-num_turns:]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256], help="numbers of ranks")
    parser.add_argument("--waiting", type=int, nargs="+", default=[50, 500, 5000], help="numbers of waiting requests")
    parser.add_argument(
        "--models", type=int, nargs="+", default=[1, 87], help="numbers of models; of several, a third fit"
    )
    parser.add_argument("--turns", type=int, default=2500, help="of the loop, timed in each case")
    parser.add_argument("--policy", help="time the passes of this scheduling policy, with one model")
    parser.add_argument("--large", action="store_true", help="with --policy: only requests of the largest size")
    args = parser.parse_args(argv)
    rows, result = list[tuple[str, str]](), dict[str, Value]({"benchmark": "scheduler_scale"})
    if args.policy:
        sizes = {max(SIZES): 1.0} if args.large else SIZES
        for ranks, waiting in product(args.ranks, args.waiting):
            passes = [1e3 * seconds for seconds in time_passes(args.policy, ranks, waiting, args.turns, sizes)]
            median, mean, p99 = percentile(passes, 0.5), fmean(passes), percentile(passes, 0.99)
            found = f"median {median:.3f} ms, mean {mean:.3f} ms, P99 {p99:.3f} ms"
            rows.append((f"{ranks} ranks, {waiting} waiting", found))
            result |= {f"{ranks}_{waiting}_mean_ms": mean, f"{ranks}_{waiting}_p99_ms": p99}
        print_report(f"CPU time of a pass of {args.policy}", rows, result, args.output)
        return
    for ranks, waiting, models in product(args.ranks, args.waiting, args.models):
        turns = asyncio.run(Loop(ranks, waiting, models).run(args.turns))
        num_nodes = sum(turn.num_nodes for turn in turns)
        mean = 1e6 * sum(turn.seconds for turn in turns) / num_nodes
        p99 = percentile([1e6 * turn.seconds / turn.num_nodes for turn in turns], 0.99)
        size = num_nodes / sum(turn.num_batches for turn in turns)
        name = "1 model" if models == 1 else f"{models} models"
        found = f"mean {mean:4.0f} us, P99 {p99:5.0f} us, {size:.1f} nodes a batch"
        rows.append((f"{ranks} ranks, {waiting} waiting, {name}", found))
        case = f"{ranks}_{waiting}_{models}"
        result |= {f"{case}_mean_us": mean, f"{case}_p99_us": p99, f"{case}_nodes_per_batch": size}
    print_report("CPU time per completed node", rows, result, args.output)


if __name__ == "__main__":
    main()
