"""Overhead of serving (FlashPS, section 6.6): per denoising step, and to hand over a result.

A step: StepScheduler.schedule for a full batch, the plan to a worker process and the result back over the ring, and
`apply`; the worker computes nothing. A hand-over: a finished picture is copied into shared memory, and announced by
messages: worker to engine (ring), engine to API server (ZeroMQ), API server to image processor (ring). A request that
goes on with more ranks: one writes its state to shared memory and says so (ring), and the plan that follows (ring) lets
each of the others copy it, here one after the other. Routing is measured by `benchmarks.micro.router_decision`.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import torch

from benchmarks.command import command
from benchmarks.report import Value, percentile, print_report
from benchmarks.simulation.engine import Ranks
from benchmarks.simulation.machine import Machine
from benchmarks.simulation.scenario import MODEL, REFERENCE, make_trace
from benchmarks.turns import in_turns, timed
from core.config import CacheConfig, SchedulerConfig
from core.handles import ArrayRef, TensorKey
from core.ipc.process import spawn
from core.ipc.ring import Channel, PeerClosedError
from core.ipc.shared_array import Arena
from core.messages.codec import MessageDecoder, encode
from core.messages.engine import Finished
from core.messages.worker import BatchResult, StepPlan, TransferDone
from core.scheduling.ops.denoise import Denoise
from core.scheduling.scheduler import StepScheduler
from model_executor.worker.stores.tensor_store import TensorStore

BATCH = 8
SIDE = 1024  # of the finished picture
STATE_BYTES, NEW_RANKS = 2**20, 3  # of a request's state, and ranks that get it
CACHE = CacheConfig(host_bytes=200 * 10**9)
_PLAN: MessageDecoder[StepPlan] = MessageDecoder(StepPlan)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps that are timed")
    parser.add_argument("--repeats", type=int, default=500, help="hand-overs that are timed")
    args = parser.parse_args(argv)
    steps = step_seconds(args.steps)
    copies, hops, messages = _copies(args.repeats), _ring_hops(args.repeats), asyncio.run(_zmq_hops(args.repeats))
    handover = [copy + 2 * hop + message for copy, hop, message in zip(copies, hops, messages, strict=True)]
    moves = [copies + 2 * hop for copies, hop in zip(_state_copies(args.repeats), hops, strict=True)]
    named = {"step_batch_8": steps, "copy_picture": copies, "ring_hop": hops, "zmq_hop": messages, "handover": handover}
    named[f"{STATE_BYTES // 2**20}_MB_of_state_to_{NEW_RANKS}_ranks"] = moves
    rows, result = list[tuple[str, str]](), dict[str, Value]({"benchmark": "overheads"})
    for name, seconds in named.items():
        median, p99 = 1e3 * statistics.median(seconds), 1e3 * percentile(seconds, 0.99)
        rows.append((name.replace("_", " "), f"median {median:.3f} ms, P99 {p99:.3f} ms"))
        result |= {f"{name}_ms": median, f"{name}_p99_ms": p99}
    print_report(f"overheads: steps of {BATCH} edits, a picture of {SIDE} x {SIDE}", rows, result, args.output)


def step_seconds(number: int) -> list[float]:
    """Seconds of steps with BATCH edits, other work in the plan included; edits are replaced as they end."""
    scheduler = StepScheduler(SchedulerConfig(max_num_seqs=BATCH), {MODEL.name: MODEL}, cache=CACHE)
    scheduler.learn(Machine().samples(MODEL.name))
    edits = iter(make_trace(replace(REFERENCE, num_edits=4000, num_templates=4), 0))
    for _ in range(BATCH):
        scheduler.add(next(edits))
    seconds = list[float]()
    with _echo() as channel:
        while len(seconds) < number:
            taken, is_full, num_done = _one_step(scheduler, channel)
            if is_full:
                seconds.append(taken)
            for _ in range(num_done):
                scheduler.add(next(edits))
    return seconds


def _one_step(scheduler: StepScheduler, channel: Channel) -> tuple[float, bool, int]:
    """(seconds, whether BATCH edits took a step, edits that ended)."""
    start = time.perf_counter()
    plan = scheduler.schedule(time.monotonic())
    assert plan is not None
    channel.send(encode(plan))
    received = _PLAN.decode(channel.recv())
    for transfer in received.transfers:
        scheduler.apply_transfer(TransferDone(transfer.source, transfer.ref))
    results = [BatchResult(b.id, b.ranks[0], 0.0, 0.05, Ranks().run(b, b.ranks[0])) for b in received.batches]
    for result in msgspec.msgpack.decode(msgspec.msgpack.encode(results), type=list[BatchResult]):
        scheduler.apply(result)
    outputs = scheduler.take_outputs()
    seconds = time.perf_counter() - start
    num_denoised = [len(b.items) for b in plan.batches if isinstance(b.items[0].work, Denoise)]
    return seconds, num_denoised == [BATCH], sum(isinstance(output, Finished) for output in outputs)


def _copies(number: int) -> list[float]:
    """A picture's pixels into an arena."""
    arena = Arena.create(0, SIDE * SIDE * 3)
    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    into = arena.view(ArrayRef(0, 0, pixels.shape, "uint8"))
    return _times(lambda: np.copyto(into, pixels), number)


def _state_copies(number: int) -> list[float]:
    """A request's state into an arena, and out of it for each new rank."""
    arena, cpu = Arena.create(0, STATE_BYTES), torch.device("cpu")
    ours, theirs = TensorStore(0, cpu, arena), [TensorStore(1 + rank, cpu, arena) for rank in range(NEW_RANKS)]
    ref = ours.put(TensorKey("request", "denoise", "latents"), torch.randn(STATE_BYTES // 4))
    ref = msgspec.structs.replace(ref, handle=ArrayRef(0, 0, (ref.nbytes,), "uint8"))

    def move() -> None:
        ours.export(ref)
        for store in theirs:
            store.resolve(ref)

    return _times(move, number)


def _ring_hops(number: int) -> list[float]:
    """Half of a round trip of a small message."""
    frame = bytes(300)
    with _echo() as channel:

        def there_and_back() -> None:
            channel.send(frame)
            channel.recv()

        return [seconds / 2 for seconds in _times(there_and_back, number)]


async def _zmq_hops(number: int) -> list[float]:
    """As over the ring, through a ZeroMQ socket to a thread's other end."""
    import zmq.asyncio

    context = zmq.asyncio.Context()
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        ours.bind(f"ipc://{folder}/pair")
        theirs.connect(f"ipc://{folder}/pair")
        try:
            seconds = list[float]()
            for _ in range(number):
                start = time.perf_counter()
                await ours.send(bytes(300))
                await theirs.recv()
                seconds.append(time.perf_counter() - start)
        finally:
            ours.close(linger=0)
            theirs.close(linger=0)
            context.term()
    return seconds


def _times(call: Callable[[], object], number: int) -> list[float]:
    """Seconds of each call, after a few that do not count."""
    return in_turns({"call": timed(call)}, number, warm_ups=5)["call"]


@contextmanager
def _echo() -> Iterator[Channel]:
    """A channel to a process that echoes messages."""
    channel, fds = Channel.create()
    child = spawn("benchmarks.micro.overheads:echo", b"", fds, "echo")
    try:
        yield channel
    finally:
        channel.close()  # it leaves then
        asyncio.run(child.wait())


def echo(_config: bytes, fds: list[int]) -> None:
    """What the child runs."""
    channel = Channel.attach(*fds)
    try:
        while True:
            channel.send(channel.recv())
    except PeerClosedError:
        channel.close()


if __name__ == "__main__":
    main()
