"""More edits than the server may queue: each one finishes or is refused at once, and none is lost."""

from __future__ import annotations

import asyncio
import base64

import openai
from pictures import alpha_mask, decode, encode, photo
from server_process import ServerProcess

API_KEY, MAX_QUEUE = "sk-local", 16  # of the shared server
NUM_EDITS = 100
PHOTO, MASK = encode(photo()), alpha_mask()


async def edit(client: openai.AsyncOpenAI, seed: int) -> tuple[int, ...] | openai.InternalServerError:
    """The shape of the picture that came back, or the refusal."""
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
    """What retry-after is for: the official client's own retries, given enough of them."""
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=API_KEY, max_retries=20, timeout=120) as client:
        answers = await asyncio.gather(*(edit(client, seed) for seed in range(2 * MAX_QUEUE)))
    assert answers == [photo().shape] * (2 * MAX_QUEUE)
