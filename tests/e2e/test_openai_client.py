"""The API through OpenAI's official client, against real processes."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from pictures import BOX, alpha_mask, decode, encode, photo, white_mask
from PIL import Image
from server_process import ServerProcess

PHOTO, ALPHA, WHITE = encode(photo()), alpha_mask(), white_mask()
API_KEY = "sk-local"


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.base_url, api_key=API_KEY, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture
async def async_client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=server.base_url, api_key=API_KEY, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture
def raw(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {API_KEY}"}, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def all_places_are_given_back(server: ServerProcess) -> Iterator[None]:
    """After each test no request is running or waiting."""
    yield
    wait_until_idle(server)


def wait_until_idle(server: ServerProcess) -> None:
    deadline = time.monotonic() + 5
    while any(queue_gauges(server).values()):
        assert time.monotonic() < deadline, queue_gauges(server)
        time.sleep(0.02)


def queue_gauges(server: ServerProcess) -> dict[str, float]:
    """num_requests_running and _waiting, by name."""
    lines = [line.split() for line in httpx.get(f"{server.url}/metrics").text.splitlines()]
    gauges = {line[0]: float(line[1]) for line in lines if line[0].startswith("stencil:num_requests_")}
    assert len(gauges) == 2
    return gauges


def pixels_of(item: Any) -> Any:
    return decode(base64.b64decode(item.b64_json, validate=True))


def extra(**fields: Any) -> dict[str, Any]:
    """Arguments that all edits of this file share."""
    return {"prompt": "a red striped shirt", "extra_body": {"seed": 1} | fields}


# --------------------------------------------------------------------------------------------------------- edits


def test_edit(client: openai.OpenAI, tmp_path: Path) -> None:
    """The README's first example: opened files in, a PNG of the same size out, unmasked pixels as they came in."""
    for name, data in (("photo.png", PHOTO), ("mask.png", ALPHA)):
        (tmp_path / name).write_bytes(data)
    with (tmp_path / "photo.png").open("rb") as image, (tmp_path / "mask.png").open("rb") as mask:
        result = client.images.edit(image=image, mask=mask, prompt="a red striped shirt")
    assert abs(result.created - time.time()) < 60
    assert (result.size, result.output_format, result.quality, result.background) == ("96x80", "png", None, None)
    assert result.data is not None
    out, inside = pixels_of(result.data[0]), np.zeros((80, 96), bool)
    inside[BOX] = True
    np.testing.assert_array_equal(out[~inside], photo()[~inside])
    assert (out[inside] != photo()[inside]).mean() > 0.5
    usage = result.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens == usage.input_tokens_details.text_tokens + usage.input_tokens_details.image_tokens
    assert usage.output_tokens == 30
    assert usage.input_tokens_details.text_tokens > 0
    assert result._request_id is not None
    assert result._request_id.startswith("req_")


def test_stencil_key(client: openai.OpenAI) -> None:
    result = client.images.edit(image=PHOTO, mask=ALPHA, **extra(guidance_scale=3, who_knows=1), input_fidelity="high")
    stencil = result.stencil
    assert set(stencil) >= {"ignored", "notes", "prompt_truncated", "seed", "mask_ratio", "active_tokens"}
    assert set(stencil) >= {"image_tokens", "cache", "tier", "primed", "full_steps", "full_blocks", "ms"}
    assert stencil["seed"] == result.data[0].seed == 1
    assert sorted(stencil["ignored"]) == ["guidance_scale", "input_fidelity", "who_knows"]
    assert 0 < stencil["mask_ratio"] < 1
    assert stencil["mask_ratio"] == stencil["active_tokens"] / stencil["image_tokens"]
    assert set(stencil["ms"]) == {"queue", "preprocess", "encode", "prime", "denoise", "decode", "postprocess"}
    assert stencil["ms"]["denoise"] > 0
    assert stencil["notes"] == []


def test_both_mask_conventions_give_the_same_picture(client: openai.OpenAI, raw: httpx.Client) -> None:
    by_alpha = client.images.edit(image=PHOTO, mask=ALPHA, **extra())
    as_text = client.images.edit(image=PHOTO, **extra(mask_image=base64.b64encode(WHITE).decode()))
    as_url = client.images.edit(
        image=PHOTO, **extra(mask_image="data:image/png;base64," + base64.b64encode(WHITE).decode())
    )
    files = {"image": PHOTO, "mask_image": WHITE}
    as_file = raw.post("/v1/images/edits", data={"prompt": "a red striped shirt", "seed": "1"}, files=files).json()
    images = [result.data[0].b64_json for result in (by_alpha, as_text, as_url)] + [as_file["data"][0]["b64_json"]]
    assert len(set(images)) == 1


def test_json_form_gives_the_same_picture(client: openai.OpenAI, raw: httpx.Client) -> None:
    expected = client.images.edit(image=PHOTO, mask=ALPHA, **extra()).data[0].b64_json
    url = "data:image/png;base64,"
    body = {
        "prompt": "a red striped shirt",
        "seed": 1,
        "images": [{"image_url": url + base64.b64encode(PHOTO).decode()}],
        "mask": {"image_url": url + base64.b64encode(ALPHA).decode()},
    }
    assert raw.post("/v1/images/edits", json=body).json()["data"][0]["b64_json"] == expected


def test_no_mask_regenerates_everything_and_says_so(client: openai.OpenAI) -> None:
    result = client.images.edit(image=PHOTO, **extra())
    assert result.stencil["mask_ratio"] == 1
    assert "whole image" in result.stencil["notes"][0]


def test_image_as_its_own_mask(client: openai.OpenAI) -> None:
    pixels = np.dstack([photo(), np.full((80, 96), 255, np.uint8)])
    pixels[(*BOX, 3)] = 0
    result = client.images.edit(image=encode(pixels), **extra())
    assert 0 < result.stencil["mask_ratio"] < 1
    assert result.stencil["notes"] == []


def test_padding_mask_crop(client: openai.OpenAI, raw: httpx.Client) -> None:
    """Every picture, previews included, is the whole picture with only the mask's area painted; JSON and multipart
    agree.
    """
    whole, mask = encode(photo(300, 200)), alpha_mask(300, 200)
    fields = extra(padding_mask_crop=10)
    several = client.images.edit(image=whole, mask=mask, n=2, **fields)
    with client.images.edit(image=whole, mask=mask, stream=True, partial_images=2, **fields) as stream:
        events = list(stream)
    url = "data:image/png;base64,"
    body = {"prompt": "a red striped shirt", "seed": 1, "padding_mask_crop": 10}
    body |= {"images": [{"image_url": url + base64.b64encode(whole).decode()}]}
    body |= {"mask": {"image_url": url + base64.b64encode(mask).decode()}}
    as_json = raw.post("/v1/images/edits", json=body).json()
    painted = [*map(pixels_of, [*several.data, *events]), decode(base64.b64decode(as_json["data"][0]["b64_json"]))]
    inside = np.zeros((200, 300), bool)
    inside[BOX] = True
    for out in painted:
        np.testing.assert_array_equal(out[~inside], photo(300, 200)[~inside])
        assert (out[inside] != photo(300, 200)[inside]).mean() > 0.5
    np.testing.assert_array_equal(painted[-1], painted[-2])
    assert len(events) == 3
    assert several.stencil["ignored"] == []
    left, top, right, bottom = as_json["stencil"]["crop"]
    assert left <= 20 < 80 <= right
    assert top <= 10 < 70 <= bottom
    plain = client.images.edit(image=whole, mask=mask, size="30x20", **extra()).stencil
    assert plain["crop"] is None
    assert as_json["stencil"]["mask_ratio"] > plain["mask_ratio"]
    small = client.images.edit(image=whole, mask=mask, size="30x20", **fields)
    assert (small.size, small.stencil["crop"]) == ("30x20", as_json["stencil"]["crop"])


def test_n_images_are_the_edits_of_following_seeds(client: openai.OpenAI) -> None:
    several = client.images.edit(image=PHOTO, mask=ALPHA, n=3, **extra(seed=7))
    assert [item.seed for item in several.data] == [7, 8, 9]
    single = client.images.edit(image=PHOTO, mask=ALPHA, **extra(seed=8))
    difference = np.abs(pixels_of(several.data[1]).astype(int) - pixels_of(single.data[0]))
    assert difference.max() <= 1
    assert several.usage.output_tokens == 3 * single.usage.output_tokens
    assert several.usage.input_tokens == single.usage.input_tokens


def test_a_pictures_gamma_goes_into_a_png_and_a_note_says_where_it_cannot(client: openai.OpenAI) -> None:
    gamma = b"gAMA" + (100000).to_bytes(4, "big")
    chunk = (4).to_bytes(4, "big") + gamma + zlib.crc32(gamma).to_bytes(4, "big")
    header = 8 + 25  # signature, IHDR
    upload = PHOTO[:header] + chunk + PHOTO[header:]
    results = {
        kind: client.images.edit(image=upload, mask=ALPHA, output_format=kind, **extra()) for kind in ("png", "jpeg")
    }
    files = {kind: base64.b64decode(result.data[0].b64_json) for kind, result in results.items()}
    assert Image.open(io.BytesIO(files["png"])).info["gamma"] == 1.0
    assert results["png"].stencil["notes"] == []
    assert results["jpeg"].stencil["notes"] == [
        "What the image says of its colours (gAMA) is not in the result, which may look different."
    ]


@pytest.mark.parametrize("output_format", ["png", "webp", "jpeg"])
def test_output_formats(client: openai.OpenAI, output_format: Any) -> None:
    result = client.images.edit(image=PHOTO, mask=ALPHA, output_format=output_format, size="64x48", **extra())
    data = base64.b64decode(result.data[0].b64_json)
    magic = {"png": b"\x89PNG", "webp": b"RIFF", "jpeg": b"\xff\xd8\xff"}[output_format]
    assert data.startswith(magic)
    assert decode(data).shape == (48, 64, 3)
    assert (result.size, result.output_format) == ("64x48", output_format)


def test_quality_sets_the_steps(client: openai.OpenAI) -> None:
    for quality, steps in (("low", 2), ("medium", 4), ("high", 8)):
        result = client.images.edit(image=PHOTO, mask=ALPHA, quality=quality, **extra())
        assert (result.quality, result.stencil["num_inference_steps"]) == (quality, steps)


def test_uploads_of_all_kinds(client: openai.OpenAI) -> None:
    """A list, bytes, a tuple, a file without a length (sent chunked); JPEG and palette images."""

    class Pipe(io.RawIOBase):
        """Not seekable: the client cannot know its length."""

        def __init__(self, data: bytes) -> None:
            self._data = io.BytesIO(data)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            return self._data.readinto(buffer)

    jpeg = encode(photo(), "jpeg")
    for image in ([PHOTO], [PHOTO, PHOTO], ("x.txt", PHOTO, "text/plain"), io.BytesIO(jpeg), Pipe(PHOTO)):
        result = client.images.edit(image=image, mask=ALPHA, **extra())  # type: ignore[arg-type]
        assert result.size == "96x80"


def test_generation(client: openai.OpenAI) -> None:
    result = client.images.generate(
        prompt="a hat", n=None, size=None, background="opaque", **{"extra_body": {"seed": 1}}
    )
    assert result.size == "128x128"
    assert result.background == "opaque"
    assert pixels_of(result.data[0]).shape == (128, 128, 3)
    assert result.usage.input_tokens_details.image_tokens == 0
    assert client.images.generate(prompt="a hat", size="64x96").size == "64x96"


# --------------------------------------------------------------------------------------------------------- streams


def test_stream(client: openai.OpenAI) -> None:
    with client.images.edit(image=PHOTO, mask=ALPHA, stream=True, partial_images=2, **extra()) as stream:
        events = list(stream)
    assert [event.type for event in events] == ["image_edit.partial_image"] * 2 + ["image_edit.completed"]
    assert [event.partial_image_index for event in events[:-1]] == [0, 1]
    assert all(pixels_of(event).shape == (80, 96, 3) for event in events)
    whole = client.images.edit(image=PHOTO, mask=ALPHA, **extra())
    assert events[-1].b64_json == whole.data[0].b64_json
    assert events[-1].usage.total_tokens == whole.usage.total_tokens
    assert events[-1].stencil["seed"] == 1
    assert events[-1].stencil["notes"] == []


@pytest.mark.parametrize(
    ("fields", "previews"),
    [
        ({"num_inference_steps": 9}, 3),
        ({"num_inference_steps": 3}, 2),
        ({"num_inference_steps": 1}, 0),
        ({"num_inference_steps": 6, "strength": 0.5, "mask_aware": False}, 2),
    ],
    ids=["enough steps", "three steps", "one step", "half of the steps"],
)
async def test_each_of_several_images_has_its_partial_images_and_a_note_says_where_they_are_fewer(
    async_client: openai.AsyncOpenAI, fields: dict[str, Any], previews: int
) -> None:
    async def told() -> dict[int, list[int | None]]:
        indices: dict[int, list[int | None]] = {}
        stream = await async_client.images.edit(
            image=PHOTO, mask=ALPHA, stream=True, partial_images=3, n=3, **extra(**fields)
        )
        async for event in stream:
            words = event.to_dict()
            indices.setdefault(words["image_index"], []).append(words.get("partial_image_index"))
            if event.type == "image_edit.completed":
                notes = [f"{previews} of 3 partial images: the run has no more steps before its last one."]
                assert words["stencil"]["notes"] == (notes if previews < 3 else [])
        return indices

    for indices in await asyncio.gather(*(told() for _ in range(4))):
        assert indices == {image: [*range(previews), None] for image in range(3)}


async def test_async_stream_of_generations(async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.images.generate(prompt="p", stream=True, partial_images=1, n=2)
    events = [event async for event in stream]
    completed = [event for event in events if event.type == "image_generation.completed"]
    assert len(completed) == 2
    assert len(events) == 4, "one partial image of each"
    assert len({event.stencil["seed"] for event in completed}) == 2
    assert all(event.type == "image_generation.partial_image" for event in events if event not in completed)


async def test_concurrent_clients(async_client: openai.AsyncOpenAI) -> None:
    """Different sizes, steps and formats at once; each gets its own picture."""

    async def edit(index: int) -> Any:
        pixels = photo(64 + index, 80 - index, seed=index)
        return await async_client.images.edit(
            image=encode(pixels), mask=alpha_mask(64 + index, 80 - index), **extra(num_inference_steps=2 + index % 4)
        )

    results = await asyncio.gather(*(edit(index) for index in range(8)))
    for index, result in enumerate(results):
        out, source = pixels_of(result.data[0]), photo(64 + index, 80 - index, seed=index)
        np.testing.assert_array_equal(out[:20], source[:20])
        assert result.stencil["num_inference_steps"] == 2 + index % 4


# --------------------------------------------------------------------------------------------------------- models


def test_models(client: openai.OpenAI) -> None:
    model = client.models.list().data[0]
    assert (model.id, model.object) == ("tiny/fill", "model")
    assert client.models.retrieve("tiny/fill") == model
    client.images.edit(image=PHOTO, mask=ALPHA, model="tiny/fill", **extra())
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-image-1")
    assert caught.value.code == "model_not_found"


# --------------------------------------------------------------------------------------------------------- errors


def bad(**changes: Any) -> dict[str, Any]:
    return {"image": PHOTO, "mask": ALPHA, "prompt": "p"} | changes


BIG = encode(np.random.default_rng(0).integers(0, 256, (1200, 1200, 3), np.uint8))  # 4.3 MB
BOMB = encode(np.zeros((2100, 2100, 3), np.uint8))


@pytest.mark.parametrize(
    ("arguments", "kind", "code", "param"),
    [
        (bad(prompt=""), "invalid_request_error", "empty_string", "prompt"),
        (bad(image=[]), "invalid_request_error", "missing_required_parameter", "image"),
        (bad(n=11), "invalid_request_error", "integer_above_max_value", "n"),
        (
            bad(extra_body={"padding_mask_crop": -1}),
            "invalid_request_error",
            "integer_below_min_value",
            "padding_mask_crop",
        ),
        (
            bad(mask=openai.omit, extra_body={"padding_mask_crop": 8}),
            "invalid_request_error",
            "invalid_value",
            "padding_mask_crop",
        ),
        (bad(n=2.0), "invalid_request_error", "invalid_type", "n"),
        (bad(size="huge"), "invalid_request_error", "invalid_value", "size"),
        (bad(response_format="url"), "invalid_request_error", "unsupported_value", "response_format"),
        (bad(extra_body={"strength": float("nan")}), "invalid_request_error", "invalid_value", "strength"),
        (
            bad(extra_body={"max_sequence_length": 999}),
            "invalid_request_error",
            "integer_above_max_value",
            "max_sequence_length",
        ),
        (bad(image=b""), "image_generation_user_error", "invalid_image_file", "image"),
        (bad(image=b"GIF89a what"), "image_generation_user_error", "invalid_image_file", "image"),
        (bad(image=PHOTO[:2000]), "image_generation_user_error", "invalid_image_file", "image"),
        (bad(mask=alpha_mask(96, 81)), "image_generation_user_error", "invalid_mask_image_format", "mask"),
        (bad(mask=WHITE), "image_generation_user_error", "invalid_mask_image_format", "mask"),
        (bad(mask=b"nothing"), "image_generation_user_error", "invalid_mask_image_format", "mask"),
        (bad(mask=[ALPHA]), "invalid_request_error", "invalid_type", "mask"),
        (bad(image=BOMB), "invalid_request_error", "image_too_large", "image"),
    ],
)
def test_bad_requests(client: openai.OpenAI, arguments: dict[str, Any], kind: str, code: str, param: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.images.edit(stream=stream, **arguments)
        error = caught.value
        assert (error.type, error.code, error.param) == (kind, code, param), str(error)
        assert error.request_id is not None
        assert str(error).startswith("Error code: 400 - ")


def test_mask_without_alpha_names_the_other_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="mask_image"):
        client.images.edit(**bad(mask=WHITE))


def test_mask_that_selects_nothing(client: openai.OpenAI) -> None:
    opaque = encode(np.full((80, 96, 4), 255, np.uint8))
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.edit(**bad(mask=opaque))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "mask")


def test_too_large_upload(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.images.edit(**bad(image=BIG))
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (413, "request_too_large", "image")


def test_wrong_key(server: ServerProcess) -> None:
    with (
        openai.OpenAI(base_url=server.base_url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.images.edit(**bad())
    assert caught.value.code == "invalid_api_key"
    assert "wrong" not in str(caught.value)


def test_retired_and_unknown_paths(client: openai.OpenAI, raw: httpx.Client) -> None:
    with pytest.warns(DeprecationWarning, match="deprecated"), pytest.raises(openai.NotFoundError) as caught:
        client.images.create_variation(image=PHOTO)
    assert caught.value.code == "unknown_url"
    assert raw.get("/v1/images/edits").json()["error"]["code"] == "method_not_allowed"
    assert raw.get("/nothing").json()["error"]["code"] == "unknown_url"


def test_timeout_is_a_504_that_is_not_retried(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=server.base_url, api_key=API_KEY, max_retries=2) as client:
        started = time.monotonic()
        with pytest.raises(openai.InternalServerError) as caught:
            client.images.edit(**bad(extra_body={"timeout": 0.05, "num_inference_steps": 200}))
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert time.monotonic() - started < 5


def assert_overloaded(error: openai.InternalServerError) -> None:
    assert (error.status_code, error.code) == (503, "server_is_overloaded")
    assert 1 <= float(error.response.headers["retry-after"]) <= 120


async def test_full_queue_is_refused_and_a_retry_succeeds(server: ServerProcess) -> None:
    """Of forty edits at once on sixteen slots, each finishes or gets a retry-after; retries finish all."""

    async def edit(client: openai.AsyncOpenAI) -> str:
        try:
            await client.images.edit(image=PHOTO, mask=ALPHA, **extra(num_inference_steps=20))
        except openai.InternalServerError as error:
            assert_overloaded(error)
            return "refused"
        return "done"

    arguments = {"base_url": server.base_url, "api_key": API_KEY}
    async with openai.AsyncOpenAI(**arguments, max_retries=0) as impatient:
        outcomes = await asyncio.gather(*(edit(impatient) for _ in range(40)))
        assert outcomes.count("done") >= 16
        assert outcomes.count("refused") >= 1
        assert await edit(impatient) == "done"  # the places were given back
    async with openai.AsyncOpenAI(**arguments, max_retries=5) as patient:
        assert set(await asyncio.gather(*(edit(patient) for _ in range(20)))) == {"done"}


def test_n_counts_towards_the_queue(client: openai.OpenAI) -> None:
    """Two times ten images do not fit into sixteen places: all or none."""
    with (
        client.images.edit(image=PHOTO, mask=ALPHA, n=10, stream=True, **extra(num_inference_steps=100)) as running,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.images.edit(image=PHOTO, mask=ALPHA, n=10, **extra())
    assert_overloaded(caught.value)
    running.close()


def test_queue_gauges_under_gateway_names(raw: httpx.Client) -> None:
    text = raw.get("/metrics").text
    assert "\nvllm:num_requests_running 0.0\n" in text
    assert "\nvllm:num_requests_waiting 0.0\n" in text


# -------------------------------------------------------------------------------------------------------- clients, gone


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_frees_its_place(server: ServerProcess, stream: bool) -> None:
    """Long edits take all slots; their clients disconnect; the next edit is served at once."""
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=API_KEY, max_retries=0) as client:
        arguments = extra(num_inference_steps=200)
        edits = [
            asyncio.create_task(
                client.images.edit(image=PHOTO, mask=ALPHA, stream=stream, partial_images=1, **arguments)
            )
            for _ in range(16)
        ]
        await asyncio.sleep(0.5)
        for edit in edits:
            edit.cancel()
            if stream and edit.done() and not edit.cancelled():
                await edit.result().close()
        await asyncio.gather(*edits, return_exceptions=True)
    wait_until_idle(server)
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=API_KEY, max_retries=0) as client:
        await client.images.edit(image=PHOTO, mask=ALPHA, **extra())


def test_log_has_one_line_per_request_and_no_prompt(client: openai.OpenAI, server: ServerProcess) -> None:
    result = client.images.edit(image=PHOTO, mask=ALPHA, prompt="a very private wish")
    deadline = time.monotonic() + 2
    while result._request_id not in server.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    text = server.log.read_text()
    assert text.count(result._request_id) == 1
    assert "private" not in text


def test_raw_events_end_with_a_blank_line(raw: httpx.Client) -> None:
    fields = {"prompt": "p", "stream": "true", "partial_images": "1"}
    files = {"image": PHOTO, "mask": ALPHA}
    with raw.stream("POST", "/v1/images/edits", data=fields, files=files) as response:
        body = response.read()
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["x-accel-buffering"] == "no"
    assert body.endswith(b"}\n\n")
    for event in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
