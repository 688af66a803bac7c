"""Loopback: an executor without processes, for an EngineCore."""

from __future__ import annotations

import asyncio

from fakes import MODEL, FakeWorkers

from core.failure import Failure
from core.messages.worker import (
    AdapterLoaded,
    Addition,
    FromWorker,
    LoadAdapter,
    LoadWorkflow,
    Removal,
    StepPlan,
    WorkerFailed,
    WorkerReady,
    WorkflowLoaded,
)
from engine.engine_core.engine_core import EngineCore


class Loopback:
    """An executor whose worker runs every plan in the event loop's next turn."""

    def __init__(self) -> None:
        self.core: EngineCore | None = None
        self.workers = FakeWorkers()
        self.killed: list[int] = []
        self.told: list[tuple[int, Addition | Removal]] = []
        self.restarted: list[tuple[int, float]] = []  # (rank, seconds to wait before)
        self.is_hung = False

    def submit(self, plan: StepPlan) -> None:
        self.workers.submit(plan)
        asyncio.get_running_loop().call_soon(self._run)

    def tell(self, rank: int, message: Addition | Removal) -> None:
        self.told.append((rank, message))
        if isinstance(message, LoadAdapter):
            self.say(AdapterLoaded(rank, message.request_id, f"of {message.path}"))
        if isinstance(message, LoadWorkflow):
            self.say(WorkflowLoaded(rank, message.request_id))

    def kill(self, rank: int) -> None:
        self.killed.append(rank)

    def restart(self, rank: int, wait_seconds: float) -> None:
        self.restarted.append((rank, wait_seconds))

    def die(self, rank: int = 0) -> None:
        self.workers.lose(rank)
        self.say(WorkerFailed(rank=rank, failure=Failure("engine_dead", f"worker {rank} died")))

    def join(self, rank: int = 0) -> None:
        self.workers.join(rank)
        self.say(WorkerReady(rank=rank, models=(MODEL,)))

    def say(self, message: FromWorker) -> None:
        assert self.core is not None
        self.core.mailbox.put_nowait(message)

    def _run(self) -> None:
        if self.is_hung:
            return
        for result in self.workers.run_one(0):
            self.say(result)
