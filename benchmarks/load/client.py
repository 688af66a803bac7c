"""The load generator: sends edits to any server of OpenAI's images API, and reads what comes back.

In an open loop edits are sent when they are due, whatever has come back, and latency counts from then: waiting for a
place within --max-concurrency, or for a late client, is the user's wait too. Bodies are made before the first edit is
due.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import httpx
import msgspec

from benchmarks.load.dataset import EditCall

BOUNDARY = f"benchmark-{secrets.token_hex(8)}"
MULTIPART = f"multipart/form-data; boundary={BOUNDARY}"


@dataclass(frozen=True)
class Target:
    """A server. url: with or without /v1 at its end. extra: fields added to every edit. partial_images: asked for, as
    events of a stream; 0: no stream. timeout: seconds for one edit. sends_slo: whether the server is told the SLO of
    edits that have one, as their `timeout`.
    """

    url: str
    model: str | None = None
    api_key: str = "none"
    extra: Mapping[str, Any] = field(default_factory=dict)
    partial_images: int = 0
    timeout: float = 600.0
    sends_slo: bool = False

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def edits(self) -> str:
        return f"{self.root}/v1/images/edits"

    @property
    def generations(self) -> str:
        return f"{self.root}/v1/images/generations"


@dataclass(frozen=True)
class Message:
    """A POST, ready to be sent. is_stream: its answer is a stream of events."""

    url: str
    body: bytes
    content_type: str = MULTIPART
    is_stream: bool = False


@dataclass
class Answer:
    """pictures: base64 of files, by ascending seed. partials: (index, picture), as they arrived. facts: the `stencil`
    object of the answer, if any. first_image: arrival of the first picture of either kind, seconds of
    time.perf_counter.
    """

    pictures: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    partials: list[tuple[int, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    first_image: float | None = None


class Refusal(Exception):
    """An answer without a picture. status: of HTTP, 0 without an answer. code: of OpenAI's error envelope. retry_after:
    seconds, if the server sent it."""

    def __init__(self, status: int, text: str, code: str = "", retry_after: float | None = None) -> None:
        super().__init__(f"status {status}: {text}")
        self.status = status
        self.code = code
        self.retry_after = retry_after

    @classmethod
    def of(cls, response: httpx.Response) -> Refusal:
        """response: read, of another status than 200."""
        retry_after = response.headers.get("retry-after")
        code = ""
        with suppress(msgspec.DecodeError):  # another server's error, or a proxy's
            code = str(msgspec.json.decode(response.content, type=_Envelope).error.get("code"))
        return cls(response.status_code, response.text[:200], code, None if retry_after is None else float(retry_after))


@dataclass(frozen=True)
class Outcome:
    """The outcome of one edit; times in seconds after the start. first_image: see Answer. error: why there is no
    picture, empty if there is one. refusal: set if the server answered without a picture. digest: of the picture's
    file; empty without one.
    """

    due: float
    sent: float
    done: float
    first_image: float | None
    error: str
    facts: Mapping[str, Any]
    slo_ms: float | None = None
    refusal: Refusal | None = None
    digest: str = ""

    @property
    def is_failed(self) -> bool:
        return bool(self.error)

    @property
    def latency(self) -> float:
        """Seconds; infinite where no picture came."""
        return float("inf") if self.error else self.done - self.due


@dataclass(frozen=True)
class Run:
    """seconds: from the start to the last answer. cpu_seconds: of this process meanwhile. started: the start, in
    seconds of time.perf_counter.
    """

    outcomes: list[Outcome]
    seconds: float
    cpu_seconds: float
    started: float = 0.0

    @property
    def latencies(self) -> list[float]:
        return [outcome.latency for outcome in self.outcomes]


class WarmUpError(Exception):
    """An edit failed that a measurement rests on, so that it would mean nothing."""


class _Picture(msgspec.Struct):
    b64_json: str | None = None
    url: str | None = None
    seed: int = 0


class _Reply(msgspec.Struct):
    data: list[_Picture] = []
    stencil: dict[str, Any] = {}


class _Event(msgspec.Struct):
    type: str = ""
    b64_json: str | None = None
    partial_image_index: int = 0
    stencil: dict[str, Any] = {}
    error: dict[str, Any] = {}


class _Envelope(msgspec.Struct):
    error: dict[str, Any] = {}


def connect(target: Target) -> httpx.AsyncClient:
    """A client with a connection for every edit under way."""
    headers = {"authorization": f"Bearer {target.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(headers=headers, limits=limits, timeout=target.timeout, trust_env=False)


async def exchange(http: httpx.AsyncClient, message: Message) -> Answer:
    """Send and wait for all pictures. Raises Refusal, httpx.HTTPError, and msgspec.DecodeError for another format."""
    headers = {"content-type": message.content_type}
    if message.is_stream:
        async with http.stream("POST", message.url, content=message.body, headers=headers) as response:
            if response.status_code != 200:
                await response.aread()
                raise Refusal.of(response)
            return await _read_events(response)
    response = await http.post(message.url, content=message.body, headers=headers)
    if response.status_code != 200:
        raise Refusal.of(response)
    reply = msgspec.json.decode(response.content, type=_Reply)
    pictures = [picture.b64_json or picture.url or "" for picture in reply.data]
    if not all(pictures) or not pictures:
        raise Refusal(200, "the answer holds no picture")
    return Answer(pictures, [picture.seed for picture in reply.data], [], reply.stencil, time.perf_counter())


async def _read_events(response: httpx.Response) -> Answer:
    answer, finals = Answer(), list[tuple[int, str]]()
    async for line in response.aiter_lines():
        if not line.startswith("data: {"):
            continue
        event = msgspec.json.decode(line.removeprefix("data: "), type=_Event)
        if event.error:
            raise Refusal(200, str(event.error), str(event.error.get("code")))
        if not event.b64_json:
            continue
        answer.first_image = answer.first_image or time.perf_counter()
        if event.type.endswith(".completed"):
            answer.facts = event.stencil
            finals.append((event.stencil.get("seed", 0), event.b64_json))
        else:
            answer.partials.append((event.partial_image_index, event.b64_json))
    if not finals:
        raise Refusal(200, "the stream ended without a completed event")
    finals.sort()
    answer.seeds, answer.pictures = [seed for seed, _ in finals], [picture for _, picture in finals]
    return answer


def multipart(fields: Mapping[str, Any], files: Mapping[str, bytes]) -> bytes:
    """A body of type MULTIPART."""
    parts = [*(_field(*each) for each in fields.items()), *(_file(*each) for each in files.items())]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def _field(name: str, value: object) -> bytes:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n'
    return f"{head}{text}\r\n".encode()


def _file(name: str, content: bytes) -> bytes:
    kind = "jpeg" if content.startswith(b"\xff\xd8") else "webp" if content.startswith(b"RIFF") else "png"
    head = f'content-disposition: form-data; name="{name}"; filename="{name}.{kind}"\r\ncontent-type: image/{kind}'
    return f"--{BOUNDARY}\r\n{head}\r\n\r\n".encode() + content + b"\r\n"


def _message(target: Target, call: EditCall) -> Message:
    fields: dict[str, Any] = {"prompt": call.prompt, "seed": call.seed, "num_inference_steps": call.steps}
    model = call.model or target.model
    fields |= {} if model is None else {"model": model}
    fields |= {"stream": True, "partial_images": target.partial_images} if target.partial_images else {}
    fields |= {"timeout": call.slo_ms / 1e3} if target.sends_slo and call.slo_ms is not None else {}
    fields, is_stream = fields | dict(target.extra), target.partial_images > 0
    if call.image is None:
        body = msgspec.json.encode(fields)
        return Message(target.generations, body, content_type="application/json", is_stream=is_stream)
    files = {"image": call.image} | ({} if call.mask is None else {"mask": call.mask})
    return Message(target.edits, multipart(fields, files), is_stream=is_stream)


async def send_on_time(
    target: Target,
    calls: Sequence[EditCall],
    due: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[], object] = lambda: None,
) -> Run:
    """An open loop: edit i is sent `due[i]` seconds after the start, if fewer than max_concurrency are under way."""
    messages = [_message(target, call) for call in calls]
    places = asyncio.Semaphore(max_concurrency or len(calls) or 1)

    async with connect(target) as http, asyncio.TaskGroup() as group:
        start, cpu = time.perf_counter(), time.process_time()

        async def one(call: EditCall, message: Message, due: float) -> Outcome:
            async with places:
                outcome = await _send(http, message, call, start, due)
            on_done()
            return outcome

        tasks = []
        for call, message, when in zip(calls, messages, due, strict=True):
            await asyncio.sleep(max(0.0, start + when - time.perf_counter()))
            tasks.append(group.create_task(one(call, message, when)))
    seconds = time.perf_counter() - start
    return Run([task.result() for task in tasks], seconds, time.process_time() - cpu, start)


async def send_in_turn(
    target: Target,
    calls: Sequence[EditCall],
    concurrency: int,
    *,
    seconds: float | None = None,
    pause: float = 0.0,
    on_done: Callable[[], object] = lambda: None,
) -> Run:
    """A closed loop: `concurrency` clients, each sending its next edit when its last one is back. seconds: edits are
    repeated, and none is sent after this time; None: each is sent once. pause: seconds that a client waits before each.
    """
    outcomes = list[Outcome]()
    start, cpu = time.perf_counter(), time.process_time()
    each = [(call, _message(target, call)) for call in calls]
    queue: Iterator[tuple[EditCall, Message]] = iter(each) if seconds is None else cycle(each)
    async with connect(target) as http, asyncio.TaskGroup() as group:

        async def one_client() -> None:
            for call, message in queue:
                await asyncio.sleep(pause)
                due = time.perf_counter() - start
                if seconds is not None and due > seconds:
                    break
                outcomes.append(await _send(http, message, call, start, due))
                on_done()

        for _ in range(concurrency):
            group.create_task(one_client())
    return Run(outcomes, time.perf_counter() - start, time.process_time() - cpu, start)


async def send_alone(http: httpx.AsyncClient, target: Target, call: EditCall) -> Outcome:
    """One edit, over a kept connection. http: of `connect`."""
    return await _send(http, _message(target, call), call, time.perf_counter(), 0.0)


async def warm_up(target: Target, calls: Sequence[EditCall], concurrency: int, *, pause: float = 0.0) -> Run:
    """send_in_turn, of edits that must succeed. Raises WarmUpError."""
    return checked(await send_in_turn(target, calls, concurrency, pause=pause))


def checked(run: Run) -> Run:
    """This run. Raises WarmUpError if an edit of it failed."""
    failed = [outcome for outcome in run.outcomes if outcome.is_failed]
    if failed:
        raise WarmUpError(f"{len(failed)} of {len(run.outcomes)} requests failed: {failed[0].error}")
    return run


async def _send(http: httpx.AsyncClient, message: Message, call: EditCall, start: float, due: float) -> Outcome:
    sent = time.perf_counter() - start
    answer, error, refusal = Answer(), "", None
    try:
        answer = await exchange(http, message)
    except (httpx.HTTPError, msgspec.DecodeError, Refusal) as failure:
        error = f"{type(failure).__name__}: {failure}"
        refusal = failure if isinstance(failure, Refusal) else None
    done = time.perf_counter() - start
    first = None if answer.first_image is None else answer.first_image - start
    digest = hashlib.sha256(answer.pictures[0].encode()).hexdigest() if answer.pictures else ""
    return Outcome(due, sent, done, first, error, answer.facts, call.slo_ms, refusal, digest)


async def worker_seconds(target: Target) -> dict[str, float] | None:
    """Computing time of all workers so far, seconds by stage ("all" without stages), from /metrics; None if absent."""
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
