"""The launcher of workers: imports what every worker imports, once, and forks them (`core/ipc/launcher.py`)."""

from __future__ import annotations

import gc
import importlib
import logging
import signal
import socket

from core.ipc.launcher import serve
from core.ipc.logs import of_request
from model_executor.deferred_compiler import defer_compiler
from model_executor.worker.main import set_up_libraries

logger = logging.getLogger("stencil.engine")


def main(_config: bytes, fds: list[int]) -> None:
    """Entry point for `core.ipc.process.spawn`. config: empty. fds: a socket from `core.ipc.local_sockets.listen`.

    Does not return: children end when their target has returned.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent leads the shutdown, also while this imports
    # No thread may run when it forks; workers set their own number. They compute on CPUs.
    set_up_libraries(num_threads=1, compiles=False, may_use_gpu=False)
    gc.disable()
    defer_compiler()  # who compiles has no launcher, see `needs_launcher`
    try:
        importlib.import_module("model_executor.worker.start")
    except Exception:  # whatever a library raises; the workers, which then import it themselves, report what they see
        logger.exception("the launcher cannot import what workers need", extra=of_request(""))
    gc.freeze()  # so that a worker's collections do not write to memory that it shares with the others
    serve(socket.socket(fileno=fds[0]), "stencil-launcher")
