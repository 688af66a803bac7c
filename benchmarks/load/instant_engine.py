"""InstantEngine: the process of an engine that answers at once, so that what is measured is all that stands before it.

It takes the place of `engine.engine_core.engine_process`. A picture is the one that was to be changed.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from types import SimpleNamespace

import msgspec
import uvloop
import zmq
import zmq.asyncio

from benchmarks.simulation.scenario import MODEL
from core.costs.cost_model import COPY_FEATURES, FEATURES
from core.costs.load_report import CopyLine, CostLine, EngineCosts, LoadReport
from core.errors import StencilError
from core.ipc.process import die_with_parent
from core.ipc.shared_array import Arena
from core.messages.engine import Drain, EngineOutputs, EngineReady, EngineRequest, Finished, PrimeTemplate, ToEngine
from core.messages.specs import EditSpec, GenerationSpec
from core.routing.fleet_costs import LINES
from engine.engine_core.engine_core import RefusedRequest
from engine.engine_core.engine_process import EngineProcessConfig, Link, connect

ENTRY = f"{__name__}:main"
"""See `engine.router.local_backend.ENTRY`."""

PARTS = ("queue", "encode", "prime", "denoise", "decode")
"""The keys of `Finished.ms`."""

STEP_SECONDS = 1e-3
"""A step takes this long by the cost model that the engine reports: routers predict with it."""


def main(config: bytes, fds: list[int]) -> None:
    """Entry point of the process."""
    settings = msgspec.msgpack.decode(config, type=EngineProcessConfig)
    with closing(Arena.attach(settings.arena_id, fds[0])) as arena:
        uvloop.run(_serve(settings, arena))


async def _serve(settings: EngineProcessConfig, arena: Arena) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set_hwm(0)
        await connect(socket, settings.address)
        die_with_parent()
        with closing(Link(socket, settings.epoch, settings.engine.hang_seconds)) as link:
            names = [model.name for model in settings.engine.models]
            infos = [msgspec.structs.replace(MODEL, name=name, page_scheme=None) for name in names]
            link.emit(EngineReady(models=tuple(infos)))
            inbox: asyncio.Queue[ToEngine | RefusedRequest] = asyncio.Queue()
            feeding = asyncio.create_task(link.feed(SimpleNamespace(mailbox=inbox)))  # type: ignore[arg-type]
            await _answer(link, arena, inbox, names)
            feeding.cancel()


async def _answer(link: Link, arena: Arena, inbox: asyncio.Queue[ToEngine | RefusedRequest], names: list[str]) -> None:
    """Until the API server wants it to end."""
    number = 0
    while not isinstance(message := await inbox.get(), Drain):
        if isinstance(message, PrimeTemplate | RefusedRequest):
            raise StencilError(f"it makes pictures alone, not {message}")
        if not isinstance(message, EngineRequest):
            continue
        number += 1
        made = _make(arena, message)
        load = LoadReport(num_received=number, num_running=0, num_waiting=0)
        if number == 1:
            load = msgspec.structs.replace(load, is_first=True, costs=_costs(names))
        link.emit(EngineOutputs(outputs=(made,), load=load))


def _make(arena: Arena, request: EngineRequest) -> Finished:
    match request.spec:
        case EditSpec() as spec:
            arena.view(spec.pixels)[:] = arena.view(spec.template)
        case GenerationSpec() as spec:
            arena.view(spec.pixels)[:] = 0
    return Finished(request.request_id, dict.fromkeys(PARTS, 0.0), 1, False, "off", None, False, 0, time.monotonic())


def _costs(names: list[str]) -> EngineCosts:
    line = STEP_SECONDS, *[0.0] * (len(FEATURES) - 1)
    copies = (CopyLine("host", (0.0,) * len(COPY_FEATURES)),)
    return EngineCosts(tuple(CostLine(name, LINES[0], line) for name in names), copies)
