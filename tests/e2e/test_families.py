"""Every model family behind the API: edits, guidance, previews, a worker that dies."""

from __future__ import annotations

import base64
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from diffusers import FlowMatchHeunDiscreteScheduler
from pictures import decode, encode
from served_edits import ALPHA, PHOTO, assert_cold_is_warm, assert_company_changes_nothing, client_of, edit, serving
from server_process import ServerProcess

from tools.random_checkpoints import make_flux, make_sd3

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
    folder = tmp_path_factory.mktemp("server")
    with serving(CHECKPOINTS[family](folder / family), folder, "--max-queue", "8") as server:
        yield server


@pytest.fixture
def client(family_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with client_of(family_server) as client:
        yield client


def test_a_masked_edit_starts_cold_and_is_the_same_warm(client: openai.OpenAI) -> None:
    assert_cold_is_warm(client)


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


def test_fields_that_a_family_cannot_use_are_named(client: openai.OpenAI, family: str) -> None:
    _, report = edit(client, negative_prompt="a hat")
    assert report["ignored"] == (["negative_prompt"] if family == "flux" else [])
    _, report = edit(client, true_cfg_scale=3.0)
    assert report["ignored"] == ["true_cfg_scale"]


def test_guided_and_plain_edits_share_batches_and_change_nothing(client: openai.OpenAI, family: str) -> None:
    exact = {"num_inference_steps": 3, "mask_aware": False}
    assert_company_changes_nothing(client, [{}, GUIDED[family], {"strength": 0.6}, exact])


def test_partial_images_come_before_the_picture(client: openai.OpenAI) -> None:
    body = {"seed": 1, "num_inference_steps": 4}
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
    picture, _ = edit(client, encode(long), mask=None)
    assert picture.shape[:2] == (16, 1024)


def until(server: ServerProcess, is_so: Callable[[dict[str, int]], bool]) -> None:
    """Wait for a state of the server's queue."""
    deadline = time.monotonic() + 60
    while not is_so(queue := httpx.get(f"{server.base_url}/engine/stats").json()["queue"]):
        assert time.monotonic() < deadline, queue
        time.sleep(0.01)


def test_a_worker_that_dies_costs_no_edit(client: openai.OpenAI, family_server: ServerProcess) -> None:
    """The last test, because the pages are lost. The picture equals that of an undisturbed run."""
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
