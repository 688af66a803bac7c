"""Executor: manages an engine's worker processes. It spawns them, sends them plans, merges their results and reports
their deaths.

It runs in the EngineCore's process and therefore does not import torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Self

import msgspec

from core.config import EngineConfig
from core.errors import EngineDeadError, MessageError
from core.failure import Failure
from core.handles import LoadedComponent
from core.ipc.logs import of_request
from core.ipc.peer_sockets import create_inboxes
from core.ipc.process import ChildProcess, spawn
from core.ipc.ring import Channel, PeerClosedError
from core.ipc.shared_array import ArenaFd
from core.messages.codec import MessageDecoder, encode
from core.messages.plan_parts import parts_of
from core.messages.salvage import WithheldItems, readable_result, sendable_plan
from core.messages.worker import (
    BatchResult,
    CostSample,
    FromWorker,
    Shutdown,
    StepPlan,
    ToWorker,
    WorkerConfig,
    WorkerFailed,
    WorkerReady,
)
from core.model_info import ModelInfo
from core.sampling_params import MAX_PROMPT_CHARACTERS

logger = logging.getLogger("stencil.engine")

RING_BYTES = 1024 * 1024
"""Size of a worker's ring, without the prompts."""
PROMPT_BYTES = 2 * 4 * MAX_PROMPT_CHARACTERS
"""The longest prompt and negative prompt in UTF-8. A plan may contain one such pair for each running request."""

WORKER_MAIN = "model_executor.worker.worker:main"
"""What a worker process runs."""

STOP_SECONDS = 5.0
"""Time for a worker to finish its step and exit before it is killed."""


class Executor:
    """The workers of one engine, by rank. An async context manager: no worker is left running after it exits."""

    def __init__(self, config: EngineConfig, pictures: ArenaFd, pages: ArenaFd, values: ArenaFd) -> None:
        """Arenas. pictures: of the client, with templates, masks and results. pages: the host tier of the activation
        cache. values: for tensors that move between ranks.
        """
        # Measured by the workers; set by `ready`.
        self.cost_samples: tuple[CostSample, ...] = ()
        self.device_page_bytes = [0] * config.workers_per_engine  # by rank
        self.components: dict[int, tuple[LoadedComponent, ...]] = {}  # rank -> what it has loaded
        self._config = config
        self._arenas = pictures, pages, values
        self._workers: list[_Worker] = []
        self._mailbox: asyncio.Queue[FromWorker] = asyncio.Queue()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Spawn the workers. They load their models in the background; see `ready`."""
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            inboxes = stack.enter_context(_inboxes(self._config.workers_per_engine))
            for rank in range(self._config.workers_per_engine):
                ring_bytes = RING_BYTES + PROMPT_BYTES * self._config.scheduler.max_num_seqs
                fds = [*(arena.fd for arena in self._arenas), *_ends_of(inboxes, rank)]
                worker = _Worker(self._worker_config(rank), fds, ring_bytes)
                self._workers.append(worker)
                stack.push_async_callback(worker.stop)
                tasks.create_task(worker.receive(self._mailbox), name=f"worker-{rank}")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def ready(self) -> dict[str, ModelInfo]:
        """Wait until every worker has loaded its models; returns name -> info. Raises the error of a worker that
        failed."""
        models: dict[str, ModelInfo] = {}
        for _ in self._workers:
            message = await self._mailbox.get()
            match message:
                case WorkerReady():
                    models |= {info.name: info for info in message.models}
                    self.cost_samples += message.samples
                    self.device_page_bytes[message.rank] = message.device_page_bytes
                    self.components[message.rank] = message.components
                case WorkerFailed():
                    raise message.failure.to_error()
                case _:
                    raise AssertionError(f"a worker without a plan sent {type(message).__name__}")
        return models

    def submit(self, plan: StepPlan) -> None:
        """Send each rank its part of the plan, without waiting. A rank that died is reported by `results`, not here."""
        for rank, part in parts_of(plan, len(self._workers)).items():
            self._send(self._workers[rank], part)

    def _send(self, worker: _Worker, plan: StepPlan) -> None:
        """Send a plan. If items cannot be encoded, these fail, and the rest is sent."""
        try:
            worker.send(plan)
        except MessageError as error:
            logger.error("%s", error, extra=of_request(""))
            saved = sendable_plan(plan, worker.rank, time.monotonic())
            worker.withheld.update(saved.withheld)
            worker.send(saved.plan)
            for answer in saved.answers:
                self._mailbox.put_nowait(answer)

    def kill(self, rank: int) -> None:
        """Kill a worker that does not answer; its death is then reported by `results`."""
        self._workers[rank].kill()

    async def results(self) -> AsyncIterator[FromWorker]:
        """The workers' messages as they arrive. The death of a rank is reported as a WorkerFailed."""
        while True:
            yield await self._mailbox.get()

    def _worker_config(self, rank: int) -> WorkerConfig:
        config, (pictures, pages, values) = self._config, self._arenas
        return WorkerConfig(
            rank,
            config.models,
            pictures.id,
            pages.id,
            values.id,
            config.cache,
            config.scheduler,
            num_workers=config.num_workers,
            device_index=config.device_index(rank),
            keeper=config.keeper,
        )


@contextmanager
def _inboxes(num_ranks: int) -> Iterator[list[tuple[int, int]]]:
    """The inboxes through which ranks exchange values, see `core.ipc.peer_sockets`; none for a single rank."""
    inboxes = create_inboxes(num_ranks) if num_ranks > 1 else []
    try:
        yield inboxes
    finally:
        for fd in (fd for inbox in inboxes for fd in inbox):
            os.close(fd)


def _ends_of(inboxes: Sequence[tuple[int, int]], rank: int) -> list[int]:
    """What one rank gets of them: its own receiving end, and all sending ends. Copies, as `spawn` closes sockets."""
    ends = [inboxes[rank][0], *(sender for _, sender in inboxes)] if inboxes else []
    return [os.dup(fd) for fd in ends]


class _Worker:
    """One worker process and the channel to it."""

    def __init__(self, config: WorkerConfig, fds: Sequence[int], ring_bytes: int) -> None:
        """fds: of the arenas and of the ranks' inboxes, for the child to inherit."""
        self.rank = config.rank
        self.withheld = WithheldItems()
        self._channel, child_fds = Channel.create(ring_bytes)
        self._process: ChildProcess = spawn(
            WORKER_MAIN,
            msgspec.msgpack.encode(config),
            [*child_fds, *fds],
            name=f"stencil-worker-{config.device_index}",
        )
        self._channel.close_child_fds()

    def send(self, message: ToWorker) -> None:
        # `receive` reports a dead worker; messages to it are dropped.
        with suppress(PeerClosedError):
            self._channel.send(encode(message))

    async def receive(self, mailbox: asyncio.Queue[FromWorker]) -> None:
        """Forward the worker's messages. When it exits, add a WorkerFailed after all it has sent."""
        decoder: MessageDecoder[FromWorker] = MessageDecoder(FromWorker)
        failed = False
        async for payload in self._channel.messages():
            message = self._read(decoder, payload)
            failed = failed or isinstance(message, WorkerFailed)
            if message is not None:
                mailbox.put_nowait(message)
        if not failed:
            await self._process.wait()
            error = EngineDeadError(f"worker {self.rank} died ({self._process.describe_exit()})")
            mailbox.put_nowait(WorkerFailed(rank=self.rank, failure=Failure.of(error)))

    def _read(self, decoder: MessageDecoder[FromWorker], payload: bytes) -> FromWorker | None:
        """The decoded message; for one that cannot be decoded, the part that can be saved, or None."""
        try:
            message: FromWorker | None = decoder.decode(payload)
        except MessageError as error:
            logger.error("worker %d: %s", self.rank, error, extra=of_request(""))
            message = readable_result(payload, error)
        return self.withheld.complete(message) if isinstance(message, BatchResult) else message

    def kill(self) -> None:
        self._process.kill()

    async def stop(self) -> None:
        self.send(Shutdown())
        await self._process.stop(STOP_SECONDS)
        self._channel.close()
