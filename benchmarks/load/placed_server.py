"""``python -m benchmarks.load.placed_server``: a server whose engines are where PLACE says, and answer as ANSWERS says;
its flags are those of `entrypoints.serve`.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

from benchmarks.load import instant_engine
from benchmarks.load.child_host import ChildHost
from core.config import EngineConfig
from core.ipc.shared_array import Arena
from engine.client import services
from engine.cluster.remote_backend import RemoteBackend
from engine.router import local_backend
from entrypoints.early_launch import configure_logging
from entrypoints.serve import main
from entrypoints.serve_args import parse_options

MODULE = __name__

Place = Literal["local", "remote"]
"""remote: as on another machine, see ChildHost."""

PLACE, INSTANT = "STENCIL_BENCHMARK_PLACE", "STENCIL_BENCHMARK_INSTANT"
"""Variables of its environment. INSTANT: its engines answer at once, see InstantEngine."""


def environment(place: Place, *, is_instant: bool = False) -> dict[str, str]:
    """For `start_server`."""
    return {PLACE: place} | ({INSTANT: "1"} if is_instant else {})


def _remote(config: EngineConfig, arena: Arena) -> RemoteBackend:
    return RemoteBackend(arena, ChildHost)


if __name__ == "__main__":
    if os.environ[PLACE] == "remote":
        services._backend = _remote
    if INSTANT in os.environ:
        local_backend.ENTRY = instant_engine.ENTRY
    options = parse_options(None)
    configure_logging(options)
    sys.exit(main(options))
