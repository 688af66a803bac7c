"""Clients that go away: in the middle of their upload, while they wait, in the middle of a stream."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from contextlib import suppress
from typing import Literal
from urllib.parse import urlsplit

import httpx

from benchmarks.soak.pictures import area, template_file, transparent_mask

Moment = Literal["upload", "wait", "stream"]
MOMENTS: tuple[Moment, ...] = ("upload", "wait", "stream")
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset instead of a goodbye


async def hang_up(url: str, pick: random.Random) -> None:
    """One client that goes away, politely or with a reset; whatever the server says meanwhile."""
    moment = pick.choice(MOMENTS)
    form = _form(url, is_stream=moment == "stream", seed=pick.randrange(2**31))
    address = urlsplit(url)
    with suppress(OSError):  # the server may be the first to hang up
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            share = pick.uniform(0.1, 0.9) if moment == "upload" else 1.0
            writer.write(form[: int(len(form) * share)])
            await writer.drain()
            await _stay(reader, moment, pick)
        finally:
            if pick.random() < 0.5:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


async def _stay(reader: asyncio.StreamReader, moment: Moment, pick: random.Random) -> None:
    match moment:
        case "upload":
            await asyncio.sleep(pick.uniform(0, 0.2))
        case "wait":
            await asyncio.sleep(pick.uniform(0, 1.0))
        case "stream":
            with suppress(TimeoutError):
                async with asyncio.timeout(20):
                    await reader.read(pick.choice((1, 400, 40_000)))  # of headers, of the first picture


def _form(url: str, is_stream: bool, seed: int) -> bytes:
    """The request as bytes on the wire."""
    fields = {"prompt": "a hat", "num_inference_steps": "20", "seed": str(seed)}
    if is_stream:
        fields |= {"stream": "true", "partial_images": "3"}
    files = {"image": template_file(0), "mask": transparent_mask(area("disc", 256, 256))}
    request = httpx.Request("POST", f"{url}/v1/images/edits", data=fields, files=files)
    head = f"POST {request.url.path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in request.headers.items())
    return head.encode() + b"\r\n" + request.read()
