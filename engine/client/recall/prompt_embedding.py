"""PromptEmbedding: has an engine embed a prompt, in a request of its own before those for the pictures.

It comes first because a request to an engine never changes: after an engine's death it is sent again as it was, so the
state in which a picture begins has to be in it. Workers cache what their text encoder makes, for the picture's request.
"""

from __future__ import annotations

import asyncio

import msgspec

from core.graph.workflows.embed_prompt import EMBED_PROMPT
from core.handles import ArrayRef, Artefact
from core.ipc.shared_array import carve
from core.messages.engine import EngineRequest, Failed, Finished, Output
from core.scheduling.ops.embed import MAX_EMBEDDING
from engine.client.recall.kept_states import Embedding
from engine.client.services import Services

EMBEDDING_BYTES = 4 * MAX_EMBEDDING


class PromptEmbedding:
    """Called in this order: embed, give_up, close."""

    def __init__(self, services: Services, memory: ArrayRef) -> None:
        """memory: for it, uint8 [EMBEDDING_BYTES], until `close`."""
        self._services = services
        self._place = carve(memory, 0, (MAX_EMBEDDING,), "float32")
        self._request_id = ""  # of a request that was submitted
        self._done = asyncio.Event()
        self._answer: Output | None = None

    async def embed(self, request: EngineRequest) -> Embedding | None:
        """The embedding of a picture's prompt. request: the picture's. None: it was not made; the picture may still be.
        Raises EngineDeadError, also if engines died of it: more of them would die of the picture's request;
        ModelUnavailableError, MessageError.
        """
        asked = self._make_request(request)
        self._services.router.submit(asked, self._on_output)
        self._request_id = asked.request_id
        await self._done.wait()
        match self._answer:
            case Finished(shapes=shapes):
                (width,) = shapes["embedding"]
                embedding: Embedding = self._services.arena.view(self._place)[:width].copy()
                return embedding
            case Failed(failure=failure) if failure.kind == "engine_dead":
                raise failure.to_error()
            case _:
                return None

    def give_up(self) -> None:
        """Abort it, if it is not made yet."""
        if self._request_id and not self._done.is_set():
            self._services.router.abort((self._request_id,))

    async def close(self) -> None:
        """Wait until no process can touch its memory any more."""
        if self._request_id:
            await self._done.wait()

    def _make_request(self, request: EngineRequest) -> EngineRequest:
        """The request for the embedding: the prompt of the picture's alone, without what it is to avoid."""
        sampling = msgspec.structs.replace(request.picture.sampling, negative_prompt=None, true_cfg_scale=None)
        spec = msgspec.structs.replace(
            request.picture, sampling=sampling, outputs={"embedding": Artefact(self._place, "value")}, previews=()
        )
        name = f"{request.request_id}-prompt"
        return msgspec.structs.replace(
            request, request_id=name, workflow=EMBED_PROMPT.name, spec=spec, rounds=(), call_id=""
        )

    def _on_output(self, output: Output) -> None:
        self._answer = output
        self._done.set()
