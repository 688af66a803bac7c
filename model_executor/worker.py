"""A worker's process: one device, its models, and a loop that does what plans say in the order they come.

Knows channels, loading and start-up; what a batch computes is the runner's. Everything heavy is imported inside `main`,
after the settings that PyTorch reads once at import, so that a failing import is reported like any other failed start.
"""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from core.failure import Failure
from core.ipc.ring import Channel, PeerClosedError
from core.ipc.shared_array import Arena
from core.messages import (
    FromWorker,
    Shutdown,
    StepPlan,
    ToWorker,
    TransferDone,
    WorkerConfig,
    WorkerFailed,
)

if TYPE_CHECKING:
    from model_executor.resident import ResidentModels
    from model_executor.runner import Runner
    from model_executor.tensor_store import TensorStore


def main(config: bytes, fds: list[int]) -> None:
    """Entry point of `core.ipc.process.spawn`: `config` is a WorkerConfig, `fds` channel memory, channel socket, arena.

    Returns when told to shut down or when the engine is gone.
    """
    # A supervisor signals the whole group: the parent leads the shutdown, and running edits are still to be finished.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = msgspec.msgpack.decode(config, type=WorkerConfig)
    channel = Channel.attach(fds[0], fds[1])
    with suppress(PeerClosedError):
        try:
            _start(settings, channel, Arena.attach(settings.arena_id, fds[2])).run()
        except PeerClosedError:
            raise  # nobody is left to tell
        except Exception as error:  # the actor's edge: the engine is told why there is no worker any more
            _send(channel, WorkerFailed(rank=settings.rank, failure=Failure.of(error, traceback.format_exc())))


def _start(settings: WorkerConfig, channel: Channel, arena: Arena) -> Worker:
    """Load everything, run every stage once, report ready."""
    num_threads = settings.models[0].threads or default_threads(settings.num_workers)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(num_threads)
    # diffusers' import makes the folder that this names, and by default one that stays behind; nothing is compiled.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    from model_executor.resident import ResidentModels, quiet_libraries, set_threads
    from model_executor.runner import Runner
    from model_executor.tensor_store import TensorStore

    set_threads(num_threads)
    quiet_libraries()
    models = ResidentModels.open(settings.models)
    models.load_all()
    models.warm_up()
    store = TensorStore(settings.rank, models.device, arena)
    worker = Worker(settings.rank, channel, models, store, Runner(settings.rank, models.families, store, arena))
    worker.send(models.ready(settings.rank))
    return worker


def default_threads(num_workers: int) -> int:
    """An equal share of the cores this process may use, but one: that is left to the server's other processes.

    Threads of one operator wait for each other at its end, so a core that is shared with anything busy stalls them all:
    beside another process on 2 cores, a step took 2 to 10 times as long with 2 threads as with 1.
    """
    return max(1, (len(os.sched_getaffinity(0)) - 1) // num_workers)


class Worker:
    """The loop: one plan after the other, one result per batch as soon as it is done."""

    def __init__(self, rank: int, channel: Channel, models: ResidentModels, store: TensorStore, runner: Runner) -> None:
        self._rank = rank
        self._channel = channel
        self._models = models
        self._store = store
        self._runner = runner
        self._decoder = msgspec.msgpack.Decoder(ToWorker)

    def run(self) -> None:
        """Until Shutdown. Raises PeerClosedError when the engine is gone, and whatever a plan cannot do that is not
        one request's: a component that does not load, a tensor to move that is not here."""
        while isinstance(plan := self._decoder.decode(self._channel.recv()), StepPlan):
            self._execute(plan)
        assert isinstance(plan, Shutdown)

    def send(self, message: FromWorker) -> None:
        """Raises PeerClosedError when the engine is gone."""
        _send(self._channel, message)

    def _execute(self, plan: StepPlan) -> None:
        """The order that StepPlan promises."""
        for component in plan.load:
            self._models.load(component)
        for batch in plan.batches:
            self.send(self._runner.run(batch))
        for transfer in plan.transfers:
            self.send(TransferDone(rank=self._rank, ref=self._store.export(transfer.ref)))
        for key in plan.free:
            self._store.free(key)
        for component in plan.unload:
            self._models.unload(component)


def _send(channel: Channel, message: FromWorker) -> None:
    channel.send(msgspec.msgpack.encode(message))
