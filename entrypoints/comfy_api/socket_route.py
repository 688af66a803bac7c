"""The websocket on which clients learn what becomes of their prompts."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress

import msgspec
from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from core.errors import InvalidRequestError, OverloadedError, StencilError
from entrypoints.comfy_api.jobs import Jobs
from entrypoints.comfy_api.prompt import MAX_ID
from entrypoints.comfy_api.sockets import Socket, Sockets, message_of
from entrypoints.openai.body.chunks import STALL_SECONDS
from entrypoints.openai.guards.middleware import answer, owner_of
from entrypoints.run_until import run_until

ROOM_SECONDS = 10.0
"""When a client that there is no room for may try again."""

TRY_AGAIN = 1013
"""Code of a connection that is closed because its client does not keep up."""


class _Said(msgspec.Struct):
    """A message of a client."""

    type: str = ""


def socket_router(sockets: Sockets, jobs: Jobs, max_upload_bytes: int) -> APIRouter:
    """max_upload_bytes: per file, as clients are told."""
    router = APIRouter()
    features = {"supports_preview_metadata": False, "max_upload_size": max_upload_bytes}

    @router.websocket("/ws")
    async def listen(websocket: WebSocket) -> None:
        """Tell a client, by its clientId, what becomes of its prompts."""
        owner, client_id = owner_of(websocket.scope), websocket.query_params.get("clientId") or uuid.uuid4().hex
        error: StencilError | None = None
        if len(client_id) > MAX_ID:
            error = InvalidRequestError(f"Invalid 'clientId': it has more than {MAX_ID} characters.", param="clientId")
        elif not sockets.has_room(owner, client_id):
            error = OverloadedError("Too many clients listen.", retry_after=ROOM_SECONDS)
        if error is not None:
            await websocket.send_denial_response(answer(websocket.scope, error))
            return
        await websocket.accept()
        with sockets.open(owner, client_id) as socket:
            socket.put(message_of("status", {**jobs.status(owner), "sid": client_id}))
            await run_until(_read(websocket, socket), _write(websocket, socket))

    async def _read(websocket: WebSocket, socket: Socket) -> None:
        """Answer what a client says, until it goes away."""
        while (message := await websocket.receive())["type"] != "websocket.disconnect":
            with suppress(msgspec.MsgspecError, RecursionError):
                if msgspec.json.decode(message.get("text") or "", type=_Said).type == "feature_flags":
                    socket.put(message_of("feature_flags", features))

    async def _write(websocket: WebSocket, socket: Socket) -> None:
        """Send what waits, until the client is given up."""
        with suppress(WebSocketDisconnect, TimeoutError):
            while (message := await socket.next()) is not None:
                async with asyncio.timeout(STALL_SECONDS):
                    sending = (
                        websocket.send_text(message) if isinstance(message, str) else websocket.send_bytes(message)
                    )
                    if not await run_until(socket.given_up.wait(), sending):
                        return
            await websocket.close(TRY_AGAIN)

    return router
