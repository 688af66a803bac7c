"""More edits than the server's queue can take: each one finishes or is refused at once, and none is lost."""

from __future__ import annotations

import asyncio
import base64
import re
from collections import Counter
from collections.abc import Iterator

import httpx
import openai
import pytest
from pictures import alpha_mask, decode, encode, photo
from server_process import ServerProcess, fork

API_KEY, MAX_QUEUE = "sk-local", 16  # of the shared server
NUM_EDITS = 100
PHOTO, MASK = encode(photo()), alpha_mask()


async def edit(client: openai.AsyncOpenAI, seed: int) -> tuple[int, ...] | openai.InternalServerError:
    """Send an edit; returns the shape of the picture, or the refusal."""
    fields = {"seed": seed, "num_inference_steps": 20}
    try:
        result = await client.images.edit(image=PHOTO, mask=MASK, prompt="a red shirt", extra_body=fields)
    except openai.InternalServerError as refusal:
        return refusal
    assert result.data is not None
    assert result.data[0].b64_json is not None
    return decode(base64.b64decode(result.data[0].b64_json)).shape


async def test_a_hundred_edits_at_once_finish_or_are_refused(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=API_KEY, max_retries=0, timeout=120) as client:
        answers = await asyncio.gather(*(edit(client, seed) for seed in range(NUM_EDITS)))
        assert await edit(client, NUM_EDITS) == photo().shape, "the crowd has left its places"
    refusals = [answer for answer in answers if isinstance(answer, openai.InternalServerError)]
    pictures = [answer for answer in answers if not isinstance(answer, openai.InternalServerError)]
    assert len(pictures) >= MAX_QUEUE
    assert set(pictures) == {photo().shape}
    assert refusals, "the queue never filled: the test proves nothing"
    for refusal in refusals:
        assert (refusal.status_code, refusal.code) == (503, "server_is_overloaded")
        assert 0 < float(refusal.response.headers["retry-after"]) <= 120


async def test_patient_clients_all_get_their_picture(server: ServerProcess) -> None:
    """The official client's own retries, enough of them, follow retry-after until all edits are done."""
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=API_KEY, max_retries=20, timeout=120) as client:
        answers = await asyncio.gather(*(edit(client, seed) for seed in range(2 * MAX_QUEUE)))
    assert answers == [photo().shape] * (2 * MAX_QUEUE)


# --------------------------------------------------------------------------------------------------- latency objective

OBJECTIVE_MS, NUM_DUE = 400, 60


@pytest.fixture(scope="module")
def aiming_server(server_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with an objective that many edits at once cannot meet."""
    flags = ("--slo-ms", str(OBJECTIVE_MS), "--max-num-seqs", "4")
    server = fork(tmp_path_factory.mktemp("aiming") / "scratch", *server_flags, *flags)
    yield server
    assert server.stop() == 0, server.log.read_text()


def counted(server: ServerProcess, name: str) -> dict[str, float]:
    """Label value -> count."""
    text = httpx.get(f"{server.url}/metrics").text
    rows = re.findall(rf'^stencil:{name}_total{{\w+="(\w+)"}} (\S+)$', text, re.MULTILINE)
    return {label: float(value) for label, value in rows}


async def send_alone(client: httpx.AsyncClient, **fields: object) -> httpx.Response:
    """Send an edit once no other is left."""
    while (await client.get("/v1/engine/stats")).json()["queue"]["admitted"]:
        await asyncio.sleep(0.02)
    return await send(client, **fields)


async def send(client: httpx.AsyncClient, **fields: object) -> httpx.Response:
    files = {"image": ("photo.png", PHOTO), "mask": ("mask.png", MASK)}
    data = {"prompt": "a red shirt", **{name: str(value) for name, value in fields.items()}}
    return await client.post("/v1/images/edits", files=files, data=data)


def assert_says_when(refusal: httpx.Response) -> None:
    assert refusal.json()["error"]["code"] == "server_is_overloaded"
    assert 1 <= int(refusal.headers["retry-after"]) <= 120


async def test_under_an_objective_every_edit_is_done_or_dropped_or_too_late(aiming_server: ServerProcess) -> None:
    async with httpx.AsyncClient(base_url=aiming_server.url, timeout=120) as client:
        for seed in range(3):
            alone = await send_alone(client, seed=seed, num_inference_steps=20)
            assert alone.status_code == 200, "an idle server refuses no edit for its objective"
        timeouts = [{"timeout": 0.3} if index % 4 == 0 else {} for index in range(NUM_DUE)]
        answers = await asyncio.gather(*(send(client, num_inference_steps=20, **timeout) for timeout in timeouts))
        afterwards = await send_alone(client, num_inference_steps=20)
    ends = Counter(answer.status_code for answer in answers)
    assert set(ends) <= {200, 503, 504}
    assert sum(ends.values()) == NUM_DUE
    assert ends[503] > NUM_DUE // 4, f"of a crowd many are dropped: {ends}"
    for answer in answers:
        if answer.status_code == 503:
            assert_says_when(answer)
    assert afterwards.status_code == 200, "the crowd has left its places"
    refused, dropped = counted(aiming_server, "request_rejects"), counted(aiming_server, "request_drops")
    assert refused["timeout"] + sum(dropped.values()) == ends[503] + ends[504]
    objective = counted(aiming_server, "request_slo")
    assert objective["met"] + objective["missed"] == ends[200] + 4


async def test_a_timeout_that_cannot_be_met_is_refused_at_once(aiming_server: ServerProcess) -> None:
    async with httpx.AsyncClient(base_url=aiming_server.url, timeout=120) as client:
        assert (await send_alone(client)).status_code == 200
        answer = await send_alone(client, timeout=0.01, num_inference_steps=200)
    assert answer.status_code == 504
    assert "when the server is idle" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"


async def test_a_full_queue_makes_room_for_a_higher_class(server: ServerProcess) -> None:
    headers = {"authorization": f"Bearer {API_KEY}"}
    before = counted(server, "request_drops")["displaced"]
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120) as client:
        low = [asyncio.create_task(send(client, priority=1, num_inference_steps=100)) for _ in range(MAX_QUEUE)]
        while (await client.get("/v1/engine/stats")).json()["queue"]["admitted"] < MAX_QUEUE:
            await asyncio.sleep(0.01)
        equal, high = await asyncio.gather(send(client, priority=1), send(client, priority=0))
        answers = await asyncio.gather(*low)
    assert equal.status_code == 503
    assert high.status_code == 200
    assert sorted(answer.status_code for answer in answers) == [200] * (MAX_QUEUE - 1) + [503]
    (displaced,) = (answer for answer in answers if answer.status_code == 503)
    assert_says_when(displaced)
    assert counted(server, "request_drops")["displaced"] == before + 1
