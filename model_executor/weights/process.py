"""The process of the keeper of weights, of which a server has one.

What several ranks and engines use is loaded and held once, and outlives each of them. Loading is in a process of its
own also because it would disturb a worker that computes: the libraries hold the interpreter's lock for seconds, and
change settings of the whole process, such as PyTorch's default dtype. Heavy imports are inside the function, as in
`model_executor.worker.main`.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile

from core.ipc.heap import return_freed_memory
from core.ipc.process import die_with_parent

NICENESS = 10
"""Of the process: it yields to all others."""


def main(config: bytes, fds: list[int]) -> None:
    """Entry point for `core.ipc.process.spawn`. config: empty. fds: a socket from `core.ipc.local_sockets.listen`."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one to the whole group: the parent leads the shutdown
    die_with_parent()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    # Importing diffusers creates this folder, by default one that is left behind; nothing is compiled into it.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    from model_executor.deferred_compiler import defer_compiler

    defer_compiler()  # it reads weights, and compiles nothing
    from model_executor.checkpoint.libraries import quiet_libraries
    from model_executor.weights.keeper import Keeper

    os.nice(NICENESS)  # not while libraries are imported: a server that starts waits for them
    return_freed_memory()
    quiet_libraries()
    Keeper(socket.socket(fileno=fds[0])).run()
