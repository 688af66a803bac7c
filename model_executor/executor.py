"""Executor: manages an engine's worker processes. It spawns them, sends them plans, merges their results, reports their
deaths, and restarts them.

It runs in the EngineCore's process and therefore does not import torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Self

import msgspec

from core.config import CacheConfig, EngineConfig
from core.errors import EngineDeadError, MessageError
from core.failure import Failure
from core.handles import LoadedComponent
from core.ipc.launched_process import launch
from core.ipc.logs import of_request
from core.ipc.peer_sockets import Inboxes
from core.ipc.process import ChildProcess, spawn
from core.ipc.ring import Channel, PeerClosedError
from core.ipc.shared_array import ArenaFd
from core.messages.codec import MessageDecoder, encode
from core.messages.peers import RankGone
from core.messages.plan_parts import parts_of
from core.messages.worker import (
    Addition,
    CostSample,
    FromWorker,
    Removal,
    Shutdown,
    StepPlan,
    ToWorker,
    WorkerConfig,
    WorkerFailed,
    WorkerReady,
)
from core.model_info import ModelInfo
from core.restarts import restart_limit
from core.sampling_params import MAX_PROMPT_CHARACTERS

logger = logging.getLogger("stencil.engine")

RING_BYTES = 1024 * 1024
"""Size of a worker's ring, without the prompts."""
PROMPT_BYTES = 2 * 4 * MAX_PROMPT_CHARACTERS
"""The longest prompt and negative prompt in UTF-8. A plan may contain one such pair for each running request."""

WORKER_MAIN = "model_executor.worker.main:main"
"""What a worker process runs."""

LAST_WORDS_SECONDS = 5.0
"""How long messages of a worker that has ended are still read; they are in shared memory already."""

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
        self.ports: dict[int, int] = {}  # rank -> where groups meet of which it is the first
        self.sizes: tuple[LoadedComponent, ...] = ()  # of all components, loaded or not
        self._config = config
        self._arenas = pictures, pages, values
        self._workers: list[_Worker] = []
        self._mailbox: asyncio.Queue[FromWorker] = asyncio.Queue()
        self._stack = AsyncExitStack()
        self._tasks: asyncio.TaskGroup | None = None
        self._restarting: dict[int, asyncio.Task[None]] = {}  # rank -> task that starts its next worker
        self._inboxes = Inboxes(config.workers_per_engine)
        self._next_seq = 0  # after the last plan
        self._start_seconds = config.start_seconds  # time limit of the next start
        self._launcher = config.launcher  # its address; "" = workers are spawned

    async def __aenter__(self) -> Self:
        """Spawn the workers. They load their models in the background; see `ready`."""
        async with AsyncExitStack() as stack:
            self._tasks = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(self._inboxes.close)
            stack.push_async_callback(self._stop)
            for rank in range(self._config.workers_per_engine):
                self._workers.append(self._spawn(rank, self._config.cache, is_first=True))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def ready(self) -> dict[str, ModelInfo]:
        """Wait until every worker has loaded its models; returns name -> info. Raises the error of a worker that
        failed."""
        started = time.monotonic()
        models: dict[str, ModelInfo] = {}
        for _ in self._workers:
            message = await self._mailbox.get()
            match message:
                case WorkerReady():
                    models |= {info.name: info for info in message.models}
                    self.cost_samples += message.samples
                    self.device_page_bytes[message.rank] = message.device_page_bytes
                    self.components[message.rank], self.sizes = message.components, message.sizes
                    self.ports[message.rank] = message.port
                case WorkerFailed():
                    raise message.failure.to_error()
                case _:
                    raise AssertionError(f"a worker without a plan sent {type(message).__name__}")
        self._start_seconds = restart_limit(time.monotonic() - started, self._config.start_seconds)
        return models

    def submit(self, plan: StepPlan) -> None:
        """Send each rank its part of the plan, without waiting. A rank that died is reported by `results`, not here;
        one that is restarted gets nothing until it is ready. A rank whose part cannot be encoded is killed, so that the
        requests in it are judged as after any death.
        """
        self._next_seq = plan.seq + 1
        for rank, part in parts_of(plan).items():
            if rank in self._restarting:
                continue
            try:
                self._workers[rank].send(part)
            except MessageError as error:
                logger.error("worker %d is killed, as its plan cannot be sent: %s", rank, error, extra=of_request(""))
                self.kill(rank)

    def tell(self, rank: int, message: Addition | Removal) -> None:
        """Send a rank what is no plan. One that died is reported by `results`, not here."""
        self._workers[rank].send(message)

    def kill(self, rank: int) -> None:
        """Kill a worker that does not answer; its death is then reported by `results`."""
        self._workers[rank].kill()

    def restart(self, rank: int, wait_seconds: float) -> None:
        """Restart a worker whose death was reported, after this wait. Ends with a WorkerReady among `results`, or
        with another WorkerFailed. Other ranks wait no more for what the dead one was to send.
        """
        assert self._tasks is not None
        gone = encode(RankGone(rank, self._next_seq))
        for other in range(len(self._workers)):
            if other != rank:
                self._inboxes.tell(other, gone)
        self._end_restart(rank)
        self._restarting[rank] = self._tasks.create_task(self._restart(rank, wait_seconds), name=f"restart-{rank}")

    async def results(self) -> AsyncIterator[FromWorker]:
        """The workers' messages as they arrive. The death of a rank is reported as a WorkerFailed once its process has
        ended, after all that it has sent.
        """
        while True:
            message = await self._mailbox.get()
            if isinstance(message, WorkerReady):
                self._end_restart(message.rank)
            yield message

    def _end_restart(self, rank: int) -> None:
        task = self._restarting.pop(rank, None)
        if task is not None:
            task.cancel()

    async def _restart(self, rank: int, wait_seconds: float) -> None:
        await self._workers[rank].stop()
        if self._launcher and not self._workers[rank].was_started:
            logger.warning(
                "the launcher forked no worker %d; workers are spawned from now on", rank, extra=of_request("")
            )
            self._launcher = ""
        await asyncio.sleep(wait_seconds)
        # Its device tier stays as large as at first, so that the same pages fit.
        cache = msgspec.structs.replace(self._config.cache, device_bytes=self.device_page_bytes[rank])
        try:
            self._workers[rank] = self._spawn(rank, cache, is_first=False)
        except OSError as error:
            self._mailbox.put_nowait(WorkerFailed(rank=rank, failure=Failure.of(error)))
            return
        await asyncio.sleep(self._start_seconds)
        logger.error("worker %d did not start in %.0f s and is killed", rank, self._start_seconds, extra=of_request(""))
        self._workers[rank].kill()

    def _spawn(self, rank: int, cache: CacheConfig, *, is_first: bool) -> _Worker:
        assert self._tasks is not None
        ring_bytes = RING_BYTES + PROMPT_BYTES * self._config.scheduler.max_num_seqs
        # Measuring in several workers at once would disturb the measurements.
        config = self._worker_config(rank, cache, measures=is_first and rank == 0)
        inboxes = self._inboxes.ends_of(rank)
        try:
            worker = _Worker(config, [*(arena.fd for arena in self._arenas), *inboxes], ring_bytes, self._launcher)
        except BaseException:
            for fd in inboxes:
                with suppress(OSError):  # a start that failed late has closed them
                    os.close(fd)
            raise
        self._tasks.create_task(worker.receive(self._mailbox), name=f"worker-{rank}")
        return worker

    def _worker_config(self, rank: int, cache: CacheConfig, *, measures: bool) -> WorkerConfig:
        config, (pictures, pages, values) = self._config, self._arenas
        return WorkerConfig(
            rank,
            config.models,
            pictures.id,
            pages.id,
            values.id,
            cache,
            config.scheduler,
            num_workers=config.num_workers,
            group_seconds=config.hang_seconds / 2,
            device_index=config.device_index(rank),
            keeper=config.keeper,
            measures_costs=measures,
            classes=config.classes,
            workflows=config.workflows,
        )

    async def _stop(self) -> None:
        for task in self._restarting.values():
            task.cancel()
        await asyncio.gather(*(worker.stop() for worker in self._workers))


class _Worker:
    """One worker process and the channel to it."""

    def __init__(self, config: WorkerConfig, fds: Sequence[int], ring_bytes: int, launcher: str) -> None:
        """fds: of the arenas and of the ranks' inboxes, for the child to inherit. launcher: its address; "": none.

        Raises OSError if no process can be started; the caller then closes what it owns of `fds`.
        """
        self.rank = config.rank
        self._why: WorkerFailed | None = None  # said by the worker, or of a message of it that cannot be decoded
        self._channel, child_fds = Channel.create(ring_bytes)
        try:
            self._process = _start(config, [*child_fds, *fds], launcher)
        except BaseException:
            self._channel.close()
            raise
        self._channel.close_child_fds()

    def send(self, message: ToWorker) -> None:
        # `receive` reports a dead worker; messages to it are dropped.
        with suppress(PeerClosedError):
            self._channel.send(encode(message))

    @property
    def was_started(self) -> bool:
        """Whether there has been a process, as far as is known."""
        return bool(self._process.pid)

    async def receive(self, mailbox: asyncio.Queue[FromWorker]) -> None:
        """Forward the worker's messages. When its process has ended, add a WorkerFailed after all that it has sent: its
        own, if it has said why. A worker whose message cannot be decoded is killed.
        """
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._forward(mailbox))
            await self._process.wait()
            # The channel ends with the process, unless a launcher that hangs still holds the child's end.
            await asyncio.wait([reader], timeout=LAST_WORDS_SECONDS)
            reader.cancel()
        error = EngineDeadError(f"worker {self.rank} died ({self._process.describe_exit()})")
        mailbox.put_nowait(self._why or WorkerFailed(rank=self.rank, failure=Failure.of(error)))

    async def _forward(self, mailbox: asyncio.Queue[FromWorker]) -> None:
        decoder: MessageDecoder[FromWorker] = MessageDecoder(FromWorker)
        async for payload in self._channel.messages():
            try:
                message = decoder.decode(payload)
            except MessageError as error:
                message = WorkerFailed(rank=self.rank, failure=Failure.of(error))
            if isinstance(message, WorkerFailed):
                self._why = message
                self.kill()  # it must not touch anything any more, and what it says after a lost message is not heard
            elif self._why is None:
                mailbox.put_nowait(message)

    def kill(self) -> None:
        self._process.kill()

    async def stop(self) -> None:
        self.send(Shutdown())
        await self._process.stop(STOP_SECONDS)
        self._channel.close()


def _start(config: WorkerConfig, fds: Sequence[int], launcher: str) -> ChildProcess:
    """Fork a worker from the launcher; spawn one if there is none, or it has died."""
    payload, name = msgspec.msgpack.encode(config), f"stencil-worker-{config.device_index}"
    if launcher:
        try:
            return launch(launcher, WORKER_MAIN, payload, fds, name)
        except OSError as error:
            logger.warning("no launcher answers (%s); %s is spawned", error, name, extra=of_request(""))
    return spawn(WORKER_MAIN, payload, fds, name)
