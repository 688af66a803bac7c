"""PromptEmbedding: what happens if the prompt cannot be embedded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import fakes
import pytest

from core.errors import EngineDeadError
from core.failure import Failure
from core.messages.engine import Aborted, EngineRequest, Failed, Output
from engine.client.recall.prompt_embedding import EMBEDDING_BYTES, PromptEmbedding
from engine.client.sessions.client_arena import ClientArena


def embed(answer: Callable[[str], Output]) -> object:
    """With a router that has this answer to each request."""

    def submit(request: EngineRequest, waiter: Callable[[Output], None]) -> None:
        waiter(answer(request.request_id))

    arena = ClientArena(EMBEDDING_BYTES)
    services = SimpleNamespace(router=SimpleNamespace(submit=submit), arena=arena)
    prompt = PromptEmbedding(services, arena.alloc(EMBEDDING_BYTES))  # type: ignore[arg-type]
    return asyncio.run(prompt.embed(fakes.make_edit("r")))


def test_a_picture_whose_prompt_has_killed_engines_is_not_tried_on_others() -> None:
    with pytest.raises(EngineDeadError, match="2 engines died"):
        embed(lambda name: Failed(request_id=name, failure=Failure("engine_dead", "2 engines died while running this")))


def test_after_other_failures_the_picture_is_made_without_a_state() -> None:
    assert embed(lambda name: Failed(request_id=name, failure=Failure("out_of_memory", "no room"))) is None
    assert embed(lambda name: Aborted(request_id=name)) is None
