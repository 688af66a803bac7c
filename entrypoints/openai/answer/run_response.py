"""RunResponse: runs a workflow of users' classes on the engine and sends what it has made."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from starlette.types import Send

from engine.client.run_files import RunResults
from entrypoints.openai.answer.edit_response import EngineResponse, send_json
from entrypoints.openai.answer.responses import Parts
from entrypoints.openai.answer.shown_values import shown_values
from entrypoints.openai.guards.request_record import RequestRecord
from entrypoints.openai.run_request import RunCall


class RunResponse(EngineResponse[RunCall]):
    """The answer to a request that names a workflow: its pictures in `data`, all other results in `values`."""

    async def _run(self, record: RequestRecord, send: Send) -> None:
        async with self._engine.run_files(record.request_id, self._call.asked, self._call.encoding) as results:
            self._submission.close()  # the engine has its own copy by now
            await send_json(send, await run_response(self._call, results))


async def run_response(call: RunCall, results: RunResults) -> Parts:
    """The JSON body. Values are written beside the event loop, as tensors may be large."""
    head: dict[str, Any] = {"created": int(time.time())}
    if results.pictures:
        first = results.pictures[0]
        head |= {"output_format": call.encoding.output_format, "size": f"{first.width}x{first.height}"}
    if call.safety_identifier:
        head["safety_identifier"] = call.safety_identifier
    parts: Parts = [msgspec.json.encode(head)[:-1] + b',"data":[']
    for index, picture in enumerate(results.pictures):
        parts += [b'{"b64_json":"' if index == 0 else b',{"b64_json":"', picture.text]
        parts.append(b'",' + msgspec.json.encode({"name": picture.name})[1:])
    parts.append(b"]," + (await asyncio.to_thread(_tail, call, results))[1:])
    return parts


def _tail(call: RunCall, results: RunResults) -> bytes:
    return msgspec.json.encode({"values": shown_values(results.values), "stencil": {"ignored": call.ignored}})
