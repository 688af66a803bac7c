"""Sends edits when they are due, whatever has come back, to any server of OpenAI's images API.

Latency counts from when an edit was due: waiting for a place within --max-concurrency, or for a client that is late, is
the user's wait too. Bodies are made before the first edit is due, so that little is left to do by then.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from benchmarks.load.dataset import EditCall

BOUNDARY = f"benchmark-{secrets.token_hex(8)}"
MULTIPART = f"multipart/form-data; boundary={BOUNDARY}"


@dataclass(frozen=True)
class Target:
    """A server. url: with or without /v1 at its end. extra: fields added to every edit. partial_images: asked for, as
    events of a stream; 0: no stream. timeout: seconds for one edit.
    """

    url: str
    model: str | None = None
    api_key: str = "none"
    extra: Mapping[str, Any] = field(default_factory=dict)
    partial_images: int = 0
    timeout: float = 600.0

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def edits(self) -> str:
        return f"{self.root}/v1/images/edits"


@dataclass(frozen=True)
class Outcome:
    """What became of one edit; times in seconds after the start. first_image: when a partial or the final picture was
    there. error: why there is none, empty where there is. facts: what a server tells beyond OpenAI's answer, in the
    shape of Stencil's `stencil` object.
    """

    due: float
    sent: float
    done: float
    first_image: float | None
    error: str
    facts: Mapping[str, Any]
    slo_ms: float | None = None

    @property
    def is_failed(self) -> bool:
        return bool(self.error)

    @property
    def latency(self) -> float:
        """Seconds; infinite where no picture came."""
        return float("inf") if self.error else self.done - self.due


@dataclass(frozen=True)
class Run:
    """seconds: from the start to the last answer. cpu_seconds: of this process meanwhile."""

    outcomes: list[Outcome]
    seconds: float
    cpu_seconds: float


class WarmUpError(Exception):
    """An edit that a measurement is prepared with failed: what came after it would mean nothing."""


class _Picture(msgspec.Struct):
    b64_json: str | None = None
    url: str | None = None


class _Answer(msgspec.Struct):
    """Of an edit, and of a stream's last event."""

    data: list[_Picture] = []
    b64_json: str | None = None
    stencil: dict[str, Any] = {}


class _Event(msgspec.Struct):
    type: str = ""
    b64_json: str | None = None
    stencil: dict[str, Any] = {}
    error: dict[str, Any] = {}


def prepare(target: Target, calls: Sequence[EditCall]) -> list[bytes]:
    """The bodies of these edits."""
    return [_body(target, call) for call in calls]


async def send_on_time(
    target: Target,
    calls: Sequence[EditCall],
    due: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[], object] = lambda: None,
) -> Run:
    """An open loop: edit i is sent `due[i]` seconds after the start, or as soon then as fewer than max_concurrency are
    under way.
    """
    bodies = prepare(target, calls)
    places = asyncio.Semaphore(max_concurrency or len(calls) or 1)

    async with connect(target) as http, asyncio.TaskGroup() as group:
        start, cpu = time.perf_counter(), time.process_time()

        async def one(call: EditCall, body: bytes, due: float) -> Outcome:
            async with places:
                outcome = await _send(http, target, call, body, start, due)
            on_done()
            return outcome

        tasks = []
        for call, body, when in zip(calls, bodies, due, strict=True):
            await asyncio.sleep(max(0.0, start + when - time.perf_counter()))
            tasks.append(group.create_task(one(call, body, when)))
    seconds = time.perf_counter() - start
    return Run([task.result() for task in tasks], seconds, time.process_time() - cpu)


async def send_in_turn(target: Target, calls: Sequence[EditCall], concurrency: int) -> Run:
    """A closed loop: so many clients, each sending its next edit when its last one is back."""
    bodies = prepare(target, calls)
    queue, outcomes = iter(zip(calls, bodies, strict=True)), list[Outcome]()
    start, cpu = time.perf_counter(), time.process_time()
    async with connect(target) as http, asyncio.TaskGroup() as group:

        async def one_client() -> None:
            for call, body in queue:
                due = time.perf_counter() - start
                outcomes.append(await _send(http, target, call, body, start, due))

        for _ in range(concurrency):
            group.create_task(one_client())
    return Run(outcomes, time.perf_counter() - start, time.process_time() - cpu)


async def send_alone(http: httpx.AsyncClient, target: Target, call: EditCall) -> Outcome:
    """One edit, over a connection that is kept. http: of `connect`."""
    (body,) = prepare(target, [call])
    return await _send(http, target, call, body, time.perf_counter(), 0.0)


async def warm_up(target: Target, calls: Sequence[EditCall], concurrency: int) -> Run:
    """send_in_turn, of edits that must succeed. Raises WarmUpError."""
    run = await send_in_turn(target, calls, concurrency)
    failed = [outcome for outcome in run.outcomes if outcome.is_failed]
    if failed:
        raise WarmUpError(f"{len(failed)} of {len(run.outcomes)} warm-ups failed: {failed[0].error}")
    return run


async def worker_seconds(target: Target) -> dict[str, float] | None:
    """What all workers computed so far, in seconds by stage, of a server whose /metrics count it; else None. One that
    tells no stages has the stage "all"."""
    async with connect(target) as http:
        try:
            answer = await http.get(f"{target.root}/metrics")
        except httpx.HTTPError:
            return None
    if answer.status_code != 200:
        return None
    found: dict[str, float] = {}
    for line in answer.text.splitlines():
        if "worker_busy_seconds_total" in line and not line.startswith("#"):
            named = re.search(r'stage="(\w+)"', line)
            stage = named[1] if named else "all"
            found[stage] = found.get(stage, 0.0) + float(line.split()[-1])
    return found or None


def spent_between(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> dict[str, float] | None:
    """Seconds by stage, from two answers of `worker_seconds`."""
    if before is None or after is None:
        return None
    return {stage: seconds - before.get(stage, 0.0) for stage, seconds in after.items()}


def connect(target: Target) -> httpx.AsyncClient:
    """As many connections as there are edits under way."""
    headers = {"authorization": f"Bearer {target.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(headers=headers, limits=limits, timeout=target.timeout, trust_env=False)


async def _send(
    http: httpx.AsyncClient, target: Target, call: EditCall, body: bytes, start: float, due: float
) -> Outcome:
    sent = time.perf_counter() - start
    read = _read_stream if target.partial_images else _read_answer
    error, first, facts = "", None, dict[str, Any]()
    try:
        facts, first = await read(http, target, body)
    except (httpx.HTTPError, msgspec.DecodeError, _NoPicture) as failure:
        error = f"{type(failure).__name__}: {failure}"
    done = time.perf_counter() - start
    return Outcome(due, sent, done, None if first is None else first - start, error, facts, call.slo_ms)


class _NoPicture(Exception):
    """The answer says so."""


async def _read_answer(http: httpx.AsyncClient, target: Target, body: bytes) -> tuple[dict[str, Any], float]:
    """(facts, when the picture was there)."""
    answer = await http.post(target.edits, content=body, headers={"content-type": MULTIPART})
    if answer.status_code != 200:
        raise _NoPicture(f"status {answer.status_code}: {answer.text[:200]}")
    decoded = msgspec.json.decode(answer.content, type=_Answer)
    if not decoded.data or not (decoded.data[0].b64_json or decoded.data[0].url):
        raise _NoPicture("the answer holds no picture")
    return decoded.stencil, time.perf_counter()


async def _read_stream(http: httpx.AsyncClient, target: Target, body: bytes) -> tuple[dict[str, Any], float]:
    first: float | None = None
    headers = {"content-type": MULTIPART}
    async with http.stream("POST", target.edits, content=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise _NoPicture(f"status {answer.status_code}: {(await answer.aread())[:200]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = msgspec.json.decode(line.removeprefix("data: "), type=_Event)
            if event.b64_json and first is None:
                first = time.perf_counter()
            if event.type.endswith(".completed") and event.b64_json and first is not None:
                return event.stencil, first
            if event.error:
                raise _NoPicture(str(event.error))
    raise _NoPicture("the stream ended without a completed event")


def _body(target: Target, call: EditCall) -> bytes:
    fields: dict[str, Any] = {"prompt": call.prompt, "seed": call.seed, "num_inference_steps": call.steps}
    fields |= {} if target.model is None else {"model": target.model}
    fields |= {"stream": True, "partial_images": target.partial_images} if target.partial_images else {}
    parts = [_field(name, value) for name, value in (fields | dict(target.extra)).items()]
    parts.append(_file("image", call.image))
    if call.mask is not None:
        parts.append(_file("mask", call.mask))
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def _field(name: str, value: object) -> bytes:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n'
    return f"{head}{text}\r\n".encode()


def _file(name: str, content: bytes) -> bytes:
    kind = "jpeg" if content.startswith(b"\xff\xd8") else "webp" if content.startswith(b"RIFF") else "png"
    head = f'content-disposition: form-data; name="{name}"; filename="{name}.{kind}"\r\ncontent-type: image/{kind}'
    return f"--{BOUNDARY}\r\n{head}\r\n\r\n".encode() + content + b"\r\n"
