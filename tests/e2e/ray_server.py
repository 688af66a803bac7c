"""A server whose engines are on machines of a Ray cluster."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import Process
from pathlib import Path

from benchmarks.load.ray_machines import Machines


async def serve(checkpoint: Path, found: Machines, log: Path, *flags: str) -> Process:
    """Start a server with engines on machines."""
    model = ["--model", str(checkpoint), "--threads", "1", "--dtype", "float32", "--port", "0"]
    ray = ["--data-parallel-backend", "ray", "--ray-address", found.address]
    command = [sys.executable, "-P", "-m", "entrypoints.serve", *model, *ray, *flags]
    with log.open("w") as file:
        return await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file)
