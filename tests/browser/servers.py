"""Servers for the browser tests: servers.py FOLDER '{"NAME": ["--flag", ...], ...}'.

Makes the models of models.py in that folder, starts the servers, and prints their addresses as JSON once all are ready.
They end when stdin does; the exit status is 1 if one of them left with a status other than 0. One process imports
PyTorch for all of them, see forked_server.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from forked_processes import fork
from forked_server import ForkedServer, end_warm_process, warm_process

from engine.client.processes.worker_launcher import worker_launcher

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("--port", "0", "--threads", "1", "--log-level", "warning", "--allowed-host", "stencil.test")
READY = "Stencil ready on "
STOP_SECONDS = 60.0


def main(folder: Path, flags: dict[str, list[str]]) -> int:
    log = folder / "servers.log"
    with worker_launcher.used() as launcher:
        try:
            made = asyncio.run(fork(launcher, "models:make", str(folder).encode(), [], "models").wait())
            assert made == 0, "the models could not be made"
            servers = {name: _start(own, log) for name, own in flags.items()}
            print(json.dumps({name: _address(server) for name, server in servers.items()}), flush=True)
            sys.stdin.read()
            statuses = _stop(servers)
        finally:
            end_warm_process()
            sys.stderr.write(log.read_text() if log.exists() else "")
    if any(statuses.values()):
        print(f"servers left with status {statuses}", file=sys.stderr)
    return int(any(statuses.values()))


def _start(flags: list[str], log: Path) -> ForkedServer:
    return warm_process().fork((*FLAGS, *flags), dict(os.environ), ROOT, log)


def _address(server: ForkedServer) -> str:
    line = server.stdout.readline()
    if not line.startswith(READY):
        raise RuntimeError("a server did not become ready")
    return f"{line.removeprefix(READY).split()[0]}/"


def _stop(servers: dict[str, ForkedServer]) -> dict[str, int]:
    for server in servers.values():
        server.terminate()
    return {name: server.wait(STOP_SECONDS) for name, server in servers.items()}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
