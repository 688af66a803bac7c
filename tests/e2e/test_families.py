"""Every family behind the API: edits, guidance, previews, clients that leave, a worker that dies."""

from __future__ import annotations

import base64
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from diffusers import FlowMatchHeunDiscreteScheduler
from pictures import BOX, Pixels, alpha_mask, decode, encode, photo
from server_process import ServerProcess, start

from tools.random_checkpoints import make_flux, make_sd3

STEPS = 5
PHOTO, ALPHA = encode(photo()), alpha_mask()

NOISY = {"use_dynamic_shifting": True, "stochastic_sampling": True}
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "flux": lambda path: make_flux(path, guidance_embeds=True, scheduler=NOISY),
    "sd3": lambda path: make_sd3(path, scheduler_class=FlowMatchHeunDiscreteScheduler),
}
GUIDED = {
    "flux": {"true_cfg_scale": 4.0, "negative_prompt": "a hat"},
    "sd3": {"guidance_scale": 4.0, "negative_prompt": "a hat"},
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def family_server(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    checkpoint = CHECKPOINTS[family](tmp_path_factory.mktemp("model") / family)
    flags = ("--served-model-name", "tiny", "--threads", "1", "--dtype", "float32", "--max-queue", "8")
    server = start(tmp_path_factory.mktemp("server") / "scratch", "--model", str(checkpoint), *flags)
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture
def client(family_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=family_server.base_url, api_key="none", max_retries=0) as client:
        yield client


def edit(client: openai.OpenAI, image: bytes = PHOTO, **fields: Any) -> tuple[Pixels, dict[str, Any]]:
    """The picture, and what the server says of it."""
    body = {"seed": 1, "num_inference_steps": STEPS} | fields
    mask = ALPHA if image is PHOTO else openai.omit
    result = client.images.edit(image=image, mask=mask, prompt="a red hat", extra_body=body)
    assert result.data
    return decode(base64.b64decode(result.data[0].b64_json or "")), result.stencil  # type: ignore[attr-defined]


def test_a_masked_edit_starts_cold_and_is_the_same_warm(client: openai.OpenAI) -> None:
    first, cold = edit(client)
    again, warm = edit(client)
    np.testing.assert_array_equal(again, first)
    assert (cold["cache"], warm["cache"]) == ("miss", "hit")
    assert cold["num_inference_steps"] == STEPS
    outside = np.ones(first.shape[:2], bool)
    outside[BOX] = False
    np.testing.assert_array_equal(first[outside][:, :3], photo()[outside])
    assert np.abs(first[BOX][..., :3].astype(int) - photo()[BOX]).mean() > 10


def test_an_exact_edit_is_another_picture_that_repeats(client: openai.OpenAI) -> None:
    exact, report = edit(client, mask_aware=False)
    np.testing.assert_array_equal(exact, edit(client, mask_aware=False)[0])
    assert report["cache"] == "off"


@pytest.mark.parametrize("mask_aware", [True, False])
def test_every_parameter_of_the_family_counts(client: openai.OpenAI, family: str, mask_aware: bool) -> None:
    plain, _ = edit(client, mask_aware=mask_aware)
    for fields in ({"strength": 0.5}, {"guidance_scale": 2.0}, GUIDED[family]):
        changed, report = edit(client, mask_aware=mask_aware, **fields)
        assert report["ignored"] == []
        assert np.abs(changed.astype(int) - plain).max() > 0, fields


def test_what_a_family_cannot_use_is_named(client: openai.OpenAI, family: str) -> None:
    _, report = edit(client, negative_prompt="a hat")
    assert report["ignored"] == (["negative_prompt"] if family == "flux" else [])
    _, report = edit(client, true_cfg_scale=3.0)
    assert report["ignored"] == ["true_cfg_scale"]


def test_guided_and_plain_edits_share_batches_and_change_nothing(client: openai.OpenAI, family: str) -> None:
    fields = [{}, GUIDED[family], {"strength": 0.6}, {"num_inference_steps": 3, "mask_aware": False}]
    alone = [edit(client, **each)[0] for each in fields]
    with ThreadPoolExecutor(len(fields)) as pool:
        together = list(pool.map(lambda each: edit(client, **each)[0], fields))
    for picture, before in zip(together, alone, strict=True):
        np.testing.assert_array_equal(picture, before)


def test_partial_images_come_before_the_picture(client: openai.OpenAI) -> None:
    body = {"seed": 1, "num_inference_steps": STEPS}
    stream = client.images.edit(
        image=PHOTO, mask=ALPHA, prompt="a red hat", stream=True, partial_images=2, extra_body=body
    )
    events = list(stream)
    kinds = [event.type for event in events]  # the second one is left out where the first has not left in time
    assert kinds in (["image_edit.partial_image"] * n + ["image_edit.completed"] for n in (1, 2))
    np.testing.assert_array_equal(decode(base64.b64decode(events[-1].b64_json)), edit(client)[0])


def test_a_long_picture_is_edited_whatever_positions_the_model_knows(client: openai.OpenAI) -> None:
    long = np.zeros((16, 1024, 4), np.uint8)
    long[:, :512, 3] = 255
    picture, _ = edit(client, image=encode(long))
    assert picture.shape[:2] == (16, 1024)


def until(server: ServerProcess, is_so: Callable[[dict[str, int]], bool]) -> None:
    """Wait for a state of the server's queue."""
    deadline = time.monotonic() + 60
    while not is_so(queue := httpx.get(f"{server.base_url}/engine/stats").json()["queue"]):
        assert time.monotonic() < deadline, queue
        time.sleep(0.01)


def test_clients_that_leave_give_their_places_back(client: openai.OpenAI, family_server: ServerProcess) -> None:
    for _ in range(10):  # more than there are places
        until(family_server, lambda queue: queue["admitted"] < queue["limit"])
        body = {"num_inference_steps": 200}
        stream = client.images.edit(image=PHOTO, mask=ALPHA, prompt="a", stream=True, extra_body=body)
        stream.close()
    until(family_server, lambda queue: queue["admitted"] == 0)
    edit(client)


def test_a_worker_that_dies_costs_no_edit(client: openai.OpenAI, family_server: ServerProcess) -> None:
    """Last: its pages are gone. The picture is that of an undisturbed run."""
    steps = 200  # not over by the time that the workers are killed
    expected, _ = edit(client, num_inference_steps=steps)
    workers = [child for child in family_server.children() if "worker" in " ".join(child.cmdline())]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(edit, client, num_inference_steps=steps)
        until(family_server, lambda queue: queue["running"] > 0)
        assert not running.done()
        for worker in workers:
            worker.send_signal(signal.SIGKILL)
        np.testing.assert_array_equal(running.result()[0], expected)
    assert workers
