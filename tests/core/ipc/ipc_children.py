"""Functions that child processes run in the ipc tests. Children import them by name, so they cannot be in a test
module.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import uvloop

from core.handles import ArrayRef
from core.ipc.launched_process import launch
from core.ipc.launcher import serve
from core.ipc.process import on_parent_gone, spawn
from core.ipc.ring import Channel, PeerClosedError
from core.ipc.shared_array import Arena


def echo(_config: bytes, fds: list[int]) -> None:
    """Send every frame back until the peer is gone."""
    channel = Channel.attach(*fds)
    try:
        while True:
            channel.send(channel.recv())
    except PeerClosedError:
        channel.close()


def echo_asyncio(config: bytes, fds: list[int]) -> None:
    """As `echo`, on an event loop: b"asyncio" or b"uvloop"."""

    async def serve() -> None:
        channel = Channel.attach(*fds)
        async for frame in channel.messages():
            channel.send(frame)
        channel.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if config == b"uvloop" else None) as runner:
        runner.run(serve())


def say_and_die(config: bytes, fds: list[int]) -> None:
    """Send `config` in three frames and exit without closing anything."""
    channel = Channel.attach(*fds)
    for _ in range(3):
        channel.send(config)
    os.kill(os.getpid(), signal.SIGKILL)


def fill_array(config: bytes, fds: list[int]) -> None:
    """Double the float32 array that the config names, in the arena fds[0]."""
    ref = ArrayRef(arena=7, offset=int(config), shape=(3, 5), dtype="float32")
    Arena.attach(7, fds[0]).view(ref)[...] *= 2


def report(config: bytes, fds: list[int]) -> None:
    """Write what the child knows about itself to the pipe fds[0]."""
    fds_open = sorted(int(fd) for fd in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{fd}").exists())
    seen = {
        "config": config.decode(),
        "argv": Path("/proc/self/cmdline").read_bytes().decode().split("\0"),
        "comm": Path("/proc/self/comm").read_text().strip(),
        "path": sys.path,
        "open": fds_open,
        "inheritable": [fd for fd in fds_open if os.get_inheritable(fd)],
        "fds": fds,
        "group": os.getpgrp(),
        "sigint": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "sighup": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
        "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }
    os.write(fds[0], json.dumps(seen).encode())


def return_at_once(_config: bytes, _fds: list[int]) -> None:
    """Do nothing."""


def leave(config: bytes, _fds: list[int]) -> None:
    """Exit with the code in `config`."""
    sys.exit(int(config))


def sleep(_config: bytes, _fds: list[int]) -> None:
    """Blocked in a system call."""
    time.sleep(600)


def stubborn(_config: bytes, fds: list[int]) -> None:
    """Ignore SIGTERM, say so, then sleep."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(fds[0], b"x")
    time.sleep(600)


def spin(_config: bytes, _fds: list[int]) -> None:
    """Blocked in Python code."""
    while True:
        pass


def import_torch(_config: bytes, _fds: list[int]) -> None:
    """Busy with an import for a second or more."""
    importlib.import_module("torch")
    time.sleep(600)


def remove_directory(config: bytes, fds: list[int]) -> None:
    """Clean up a directory when the parent is gone; the cleanup registered after it fails."""
    on_parent_gone(lambda: os.rmdir(config))
    on_parent_gone(lambda: 1 / 0)
    os.write(fds[0], b"ready\n")
    time.sleep(600)


def family(config: bytes, fds: list[int]) -> None:
    """A parent: spawn a `family_member` per target in the config, write all pids to fds[0], then sleep."""
    for target in json.loads(config):
        spawn("ipc_children:family_member", json.dumps(target).encode(), fds, "member")
    os.write(fds[0], f"{os.getpid()}\n".encode())
    time.sleep(600)


def family_member(config: bytes, fds: list[int]) -> None:
    """Write the own pid, start one grandchild that does the same and runs the target, and run the target as well."""
    target = json.loads(config)
    os.write(fds[0], f"{os.getpid()}\n".encode())
    if target.startswith("grand:"):
        spawn("ipc_children:family_member", json.dumps(target.removeprefix("grand:")).encode(), fds, "grandchild")
    globals()[target.removeprefix("grand:")](b"", fds)


def log_and_spawn(config: bytes, fds: list[int]) -> None:
    """Log a line of the project and two of a library, in as many generations of children as `config` says."""
    logging.getLogger("stencil.test").info("ours")
    logging.getLogger("library").info("not heard")
    logging.getLogger("library").warning("theirs")
    if left := int(config):
        child = spawn("ipc_children:log_and_spawn", str(left - 1).encode(), [], f"generation-{left - 1}")
        asyncio.run(child.wait())


def launcher(_config: bytes, fds: list[int]) -> None:
    """A launcher that listens at the socket fds[0]."""
    serve(socket.socket(fileno=fds[0]), "stencil-launcher")


def slow_launcher(config: bytes, fds: list[int]) -> None:
    """A launcher that forks nothing until the file named by `config` is there, as one that imports."""
    while not Path(config.decode()).exists():
        time.sleep(0.005)
    launcher(config, fds)


def large_launcher(config: bytes, fds: list[int]) -> None:
    """A launcher with about 30 MB of objects, as one that has imported much."""
    globals()["held"] = [str(number) for number in range(500_000)]
    launcher(config, fds)


def leave_something(_config: bytes, fds: list[int]) -> None:
    """Return while a thread has still to write to the pipe fds[0], and to stdout, which is buffered."""
    atexit.register(os.write, fds[0], b", at exit")
    threading.Thread(target=lambda: (time.sleep(0.05), os.write(fds[0], b"by a thread"))).start()
    sys.stdout.write("buffered")


def launches(config: bytes, fds: list[int]) -> None:
    """Have the launcher at the address `config` fork a child that sleeps, and sleep too."""
    child = launch(config.decode(), "ipc_children:tell_pid", b"", fds, "stencil-worker-0")
    time.sleep(600)
    child.kill()


def tell_pid(_config: bytes, fds: list[int]) -> None:
    """Write the pid to the pipe fds[0] and sleep."""
    os.write(fds[0], b"%d\n" % os.getpid())
    time.sleep(600)


def look_around(_config: bytes, fds: list[int]) -> None:
    """Write to the pipe fds[0] what is inherited from the process that asked for the child; log that."""
    logging.getLogger("stencil.engine").warning("looked around")
    os.write(fds[0], json.dumps({"folder": os.getcwd(), "environment": dict(os.environ)}).encode())
