"""Clients that misbehave: invalid requests, to be refused with 4xx, and clients that disconnect early."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from benchmarks.load.client import MULTIPART, multipart
from benchmarks.soak.edits import area, template_file, transparent_mask

_MASK = transparent_mask(area("small", 128, 128))  # of template 1


@dataclass(frozen=True)
class BadRequest:
    """call: keyword arguments of httpx."""

    name: str
    path: str = "/v1/images/edits"
    method: str = "POST"
    call: dict[str, Any] = field(default_factory=dict)


def _form(name: str, fields: dict[str, str], image: bytes | None = None, mask: bytes | None = None) -> BadRequest:
    files = {"image": image or template_file(1), "mask": mask or _MASK}
    return BadRequest(name, call={"data": {"prompt": "a hat", "num_inference_steps": "2"} | fields, "files": files})


BAD_REQUESTS: tuple[BadRequest, ...] = (
    _form("no prompt", {"prompt": ""}),
    _form("too many images", {"n": "11"}),
    _form("no steps", {"num_inference_steps": "0"}),
    _form("no number", {"seed": "1e400"}),
    _form("an unknown model", {"model": "../../etc/passwd"}),
    _form("an unknown template", {"template_id": "tmpl_0"}),
    _form("a size that is none", {"size": "7x7"}),
    _form("a huge size", {"size": "99999x99999"}),
    _form("urls", {"response_format": "url"}),
    _form("no picture", {}, image=b"not a picture"),
    _form("half a picture", {}, image=template_file(1)[:2000]),
    _form("a mask of another size", {}, mask=transparent_mask(area("small", 64, 64))),
    BadRequest("no form", call={"content": b"--x", "headers": {"content-type": "multipart/form-data; boundary=x"}}),
    BadRequest("no media type", call={"content": b"hello", "headers": {"content-type": "text/plain"}}),
    BadRequest("broken json", call={"content": b'{"prompt":', "headers": {"content-type": "application/json"}}),
    BadRequest("a url to fetch", call={"json": {"prompt": "x", "images": [{"image_url": "http://127.0.0.1/"}]}}),
    BadRequest("a number as prompt", "/v1/images/generations", call={"json": {"prompt": 5}}),
    BadRequest("a thin canvas", "/v1/images/generations", call={"json": {"prompt": "x", "size": "16x1600"}}),
    BadRequest("no such path", "/v1/no/such/path", "GET"),
    BadRequest("a wrong method", "/v1/images/edits", "GET"),
    BadRequest("a template without image", "/v1/templates", call={"files": {"other": b"x"}}),
    BadRequest("no such template", "/v1/templates/tmpl_0", "GET"),
    BadRequest("deleting no template", "/v1/templates/tmpl_0", "DELETE"),
)

Moment = Literal["upload", "wait", "stream"]
MOMENTS: tuple[Moment, ...] = ("upload", "wait", "stream")
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


async def hang_up(url: str, pick: random.Random) -> None:
    """A client that disconnects during its upload, while it waits, or in a stream; with or without a reset."""
    moment = pick.choice(MOMENTS)
    address = urlsplit(url)
    request = _raw_edit(address.netloc, is_stream=moment == "stream", seed=pick.randrange(2**31))
    with suppress(OSError):  # the server may be the first to hang up
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            share = pick.uniform(0.1, 0.9) if moment == "upload" else 1.0
            writer.write(request[: int(len(request) * share)])
            await writer.drain()
            await _stay(reader, moment, pick)
        finally:
            if pick.random() < 0.5:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


async def _stay(reader: asyncio.StreamReader, moment: Moment, pick: random.Random) -> None:
    if moment != "stream":
        await asyncio.sleep(pick.uniform(0, 0.2 if moment == "upload" else 1.0))
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(20):
            await reader.read(pick.choice((1, 400, 40_000)))  # of headers, of the first picture


def _raw_edit(host: str, is_stream: bool, seed: int) -> bytes:
    """The request as bytes on the wire."""
    fields: dict[str, Any] = {"prompt": "a hat", "num_inference_steps": 20, "seed": seed}
    fields |= {"stream": True, "partial_images": 3} if is_stream else {}
    body = multipart(fields, {"image": template_file(0), "mask": transparent_mask(area("disc", 256, 256))})
    head = f"POST /v1/images/edits HTTP/1.1\r\nhost: {host}\r\ncontent-type: {MULTIPART}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
