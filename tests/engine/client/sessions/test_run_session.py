"""A run of users' classes as the API server holds it: its memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
from run_workflows import VECTOR

from core.graph.form import tensor
from core.graph.op import Port
from core.graph.workflow import Node, Workflow
from engine.client.run_input import RunInput
from engine.client.sessions.client_arena import ClientArena
from engine.client.sessions.run_session import RunSession
from engine.client.sessions.running_sessions import RunningSessions
from engine.client.sessions.session_memory import SessionMemory

LARGE = tensor("float32", 32 << 20)
WORKFLOW = Workflow(
    "large",
    (
        Node(
            "only",
            "run",
            role="mixer",
            takes=(Port.of("a", LARGE),),
            makes=(Port.of("y", VECTOR),),
            given={"a": "a"},
        ),
    ),
    {"y": "only"},
    inputs=(Port.of("a", LARGE),),
    output_ports={"y": "y"},
)


async def test_a_run_that_is_cancelled_while_its_input_is_copied_writes_no_more() -> None:
    """Its memory is freed at once, and is another request's then."""
    sessions, arena = RunningSessions(), ClientArena(1 << 30)
    config = SimpleNamespace(image=SimpleNamespace(max_upload_bytes=1))
    forgotten = list[str]()
    images = SimpleNamespace(forget=forgotten.append)
    facts = SimpleNamespace(arena=arena, admission=None, config=config, sessions=sessions, router=None, images=images)
    services: Any = facts
    asked = RunInput(workflow="large", inputs={"a": np.full(LARGE.shape, 7, np.float32)})
    session = RunSession(services, "r", asked, WORKFLOW)

    async def run() -> None:
        with sessions.track(session):
            await session.run()

    async with asyncio.TaskGroup() as tasks:
        sessions.start(tasks)
        running = tasks.create_task(run())
        while not arena.used_bytes:
            await asyncio.sleep(0)
        running.cancel()
        await sessions.wait_idle(10)
    assert (arena.used_bytes, forgotten) == (0, ["r"])
    other = arena.view(SessionMemory(services).alloc(LARGE.nbytes))
    other[:] = 1
    await asyncio.sleep(0.2)
    assert (other == 1).all()
