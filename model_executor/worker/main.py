"""The worker process: one device, its models, and a loop that executes the engine's plans in order.

This module is its entry point and imports little: what `start.py` imports must follow the settings that PyTorch reads
once at import, and an import that fails is reported like any other failed start.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import msgspec

from core.cache_folder import user_cache_folder
from core.failure import Failure
from core.ipc.peer_sockets import PeerSockets
from core.ipc.process import die_with_parent
from core.ipc.ring import Channel, PeerClosedError
from core.ipc.shared_array import Arena
from core.messages.worker import WorkerConfig, WorkerFailed
from model_executor.worker.engine_link import EngineLink

if TYPE_CHECKING:
    from model_executor.worker.worker import Worker

CACHED_OPERATORS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 256, "LRU_CACHE_CAPACITY": 32}
"""Environment variable -> limit on compiled operators cached: by oneDNN, and by PyTorch, for each kind, on top of it.
There is one per shape, and masks differ: with the default of 1024 each, a worker with the embedded model grew by 200 MB
over some hundred edits and kept growing. With these limits it grows by 120 MB within 40 varied edits, and not in the
next 40. With 256 of each it was 185 MB, in 0.99 of the processor time; with 128 and 64, 82 MB in 1.02; with 32 of each,
30 MB in 1.12."""

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with settings of PyTorch's allocator for GPUs: its name, and the one before."""

GROWING_SEGMENTS = "expandable_segments:True"
"""Unless the user has chosen otherwise. Cached pages fill what a GPU's memory has left, and are counted in bytes, not
in places. An entry is one allocation of up to gigabytes, and pictures differ in size: in segments of a fixed size, what
a large entry leaves behind a smaller one is lost, and a later entry that should fit does not. Segments that grow have
their memory mapped page by page, so what is free can be used for any entry. What is mapped counts as reserved, as the
memory probe reads it."""


def main(config: bytes, fds: list[int]) -> None:
    """Entry point for `spawn` and `launch` of `core.ipc`. config: an encoded WorkerConfig. fds: channel memory, channel
    socket, arena, page arena, value arena; with several ranks also this rank's inbox and the sending ends of all
    inboxes.

    Returns after a Shutdown message, or when the engine is gone.
    """
    # A supervisor signals the whole process group, but the parent leads the shutdown: running edits must finish first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()  # also one that hangs in a kernel; if a launcher is the parent, that kills it with the engine
    settings = msgspec.msgpack.decode(config, type=WorkerConfig)
    link = EngineLink(Channel.attach(fds[0], fds[1]))
    with suppress(PeerClosedError):
        try:
            ids = settings.arena_id, settings.page_arena_id, settings.value_arena_id
            arenas = [Arena.attach(number, fd) for number, fd in zip(ids, fds[2:5], strict=True)]
            sockets = PeerSockets(fds[5], fds[6:]) if fds[5:] else None
            with closing(_start(settings, link, arenas, sockets)) as worker:
                worker.run()
        except PeerClosedError:
            raise  # there is no engine to report to
        except Exception as error:  # the process's outermost handler: report to the engine why the worker failed
            link.send(WorkerFailed(rank=settings.rank, failure=Failure.of(error, traceback.format_exc())))


def _start(settings: WorkerConfig, link: EngineLink, arenas: Sequence[Arena], sockets: PeerSockets | None) -> Worker:
    num_threads = settings.models[0].threads or default_threads(settings.num_workers)
    set_up_libraries(
        num_threads,
        compiles=any(model.kernels == "compile" for model in settings.models),
        may_use_gpu=any(model.device != "cpu" for model in settings.models),
    )
    gc.disable()  # otherwise a quarter of the libraries' import time goes to collections that find nothing
    from model_executor.worker.start import start

    gc.freeze()  # what was imported stays; full collections of the running worker do not walk it
    gc.enable()
    return start(settings, link, arenas, sockets, num_threads)


def set_up_libraries(num_threads: int, *, compiles: bool, may_use_gpu: bool) -> None:
    """Set the environment variables that libraries read when they are imported. compiles: whether a model's layers will
    be compiled. may_use_gpu: whether the device may be one."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(num_threads)
    for cache, capacity in CACHED_OPERATORS.items():
        os.environ.setdefault(cache, str(capacity))
    os.environ.setdefault("TRITON_CACHE_DIR", str(user_cache_folder(os.environ) / "triton"))
    if may_use_gpu and not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = GROWING_SEGMENTS
    if compiles:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(user_cache_folder(os.environ) / "inductor"))
    # Importing diffusers creates this folder, by default one that is left behind; nothing is compiled into it.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())


def default_threads(num_workers: int) -> int:
    """An equal share of the available cores, less one, which is left to the server's other processes.

    Threads of one operator wait for each other at its end, so one core that is shared with a busy process stalls all of
    them: beside another process on 2 cores, a step took 2 to 10 times as long with 2 threads as with 1.
    """
    return max(1, (len(os.sched_getaffinity(0)) - 1) // num_workers)
