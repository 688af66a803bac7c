"""Sender: sends edits in the ways that clients do, and checks every answer's status and id."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import msgspec

from benchmarks.load.client import MULTIPART, Answer, Message, Refusal, exchange, multipart
from benchmarks.soak.checking import Ledger
from benchmarks.soak.edits import Delivery, Edit, template_file, transparent_mask, white_mask

Came = TypeVar("Came")

REQUEST_SECONDS = 240.0  # without an answer until a request counts as lost
RETRIES = 200  # after 503 with retry-after
MAX_WAIT_SECONDS = 60.0


class Sender:
    """A client for any number of tasks. Lost requests: 5xx other than 504 and 503 with Retry-After, and connections
    that break."""

    def __init__(self, url: str, ledger: Ledger) -> None:
        self._ledger = ledger
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=REQUEST_SECONDS,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=5.0),
            event_hooks={"request": [self._count], "response": [self._judge]},
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def send(self, edit: Edit, delivery: Delivery, template_id: str | None = None) -> Answer:
        """Send it and wait for its pictures, with retries unless it is hasty. Raises Refusal, of status 0 without an
        answer, which is already counted."""
        self._ledger.count("requests")
        message = message_of(edit, delivery, template_id)
        return await self._patiently(lambda: exchange(self._http, message), 1 if delivery.is_hasty else RETRIES)

    async def call(self, method: str, path: str, **call: Any) -> httpx.Response:
        """Any other request, with retries. call: arguments of httpx."""
        self._ledger.count("requests")

        async def attempt() -> httpx.Response:
            response = await self._http.request(method, path, **call)
            if response.status_code == 503:
                raise Refusal.of(response)
            return response

        return await self._patiently(attempt, RETRIES)

    async def _patiently(self, attempt: Callable[[], Awaitable[Came]], tries: int) -> Came:
        while True:
            tries -= 1
            try:
                return await attempt()
            except (httpx.TransportError, msgspec.DecodeError) as error:
                self._ledger.blame("lost", f"no answer: {error!r}")
                raise Refusal(0, repr(error)) from error
            except Refusal as refusal:
                if refusal.status != 503 or refusal.retry_after is None or not tries:
                    raise
                await asyncio.sleep(min(MAX_WAIT_SECONDS, refusal.retry_after))

    async def _count(self, request: httpx.Request) -> None:
        self._ledger.count("attempts")

    async def _judge(self, response: httpx.Response) -> None:
        self._ledger.saw_request_id(response.headers.get("x-request-id", ""))
        status = response.status_code
        if status == 503 and "retry-after" in response.headers:
            self._ledger.count("refused")
        elif status >= 500 and status != 504:
            body = (await response.aread())[:500]
            self._ledger.blame("lost", f"status {status}", url=str(response.url), body=body)


def message_of(edit: Edit, delivery: Delivery, template_id: str | None = None) -> Message:
    """The request to send. Generations are always JSON."""
    is_stream, is_edit = delivery.way == "stream", edit.template is not None
    fields: dict[str, Any] = edit.fields | delivery.fields
    fields |= {"stream": True, "partial_images": edit.partial_images} if is_stream else {}
    files = _files(edit, delivery, with_image=template_id is None) if is_edit else {}
    fields |= {"template_id": template_id} if template_id is not None else {}
    path = "/v1/images/edits" if is_edit else "/v1/images/generations"
    if is_edit and delivery.way != "json":
        return Message(path, multipart(fields, files), MULTIPART, is_stream)
    return Message(path, msgspec.json.encode(fields | _as_json(files)), "application/json", is_stream)


def _files(edit: Edit, delivery: Delivery, *, with_image: bool) -> dict[str, bytes]:
    inside = edit.inside
    assert edit.template is not None
    assert inside is not None
    files = {"image": template_file(edit.template)} if with_image else {}
    return files | ({"mask_image": white_mask(inside)} if delivery.white_mask else {"mask": transparent_mask(inside)})


def _as_json(files: dict[str, bytes]) -> dict[str, Any]:
    """Files as fields of a JSON body."""
    fields: dict[str, Any] = {}
    for name, content in files.items():
        text = base64.b64encode(content).decode()
        url = {"image_url": f"data:image/png;base64,{text}"}
        fields |= {"images": [url]} if name == "image" else {name: text if name == "mask_image" else url}
    return fields
