"""SDXL and Stable Diffusion 2 behind the API."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from adapters import make_lora
from diffusers import EulerAncestralDiscreteScheduler, PNDMScheduler
from pictures import BOX, Pixels, alpha_mask, decode, encode, photo
from server_process import ServerProcess, fork

from tools.random_unet_checkpoints import make_sd, make_sdxl

STEPS = 4
SIDE = 128  # that of a picture of 16 tokens
PIXELS = photo(SIDE, SIDE)
PHOTO, ALPHA = encode(PIXELS), alpha_mask(SIDE, SIDE)

PNDM = {"skip_prk_steps": True, "prediction_type": "v_prediction"}
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "sdxl": lambda path: make_sdxl(path, scheduler_class=EulerAncestralDiscreteScheduler),
    "sd2": lambda path: make_sd(
        path, in_channels=9, scheduler_class=PNDMScheduler, scheduler=PNDM, use_linear_projection=True
    ),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    checkpoint = CHECKPOINTS[request.param](tmp_path_factory.mktemp("model") / request.param)
    lora = make_lora(tmp_path_factory.mktemp("lora") / "red.safetensors", checkpoint, text_parts=("text_encoder",))
    flags = ("--served-model-name", "tiny", "--threads", "1", "--dtype", "float32", "--lora", f"red={lora}")
    server = fork(tmp_path_factory.mktemp("server") / "scratch", "--model", str(checkpoint), *flags)
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


def edit(client: openai.OpenAI, **fields: Any) -> tuple[Pixels, dict[str, Any]]:
    """Run an edit; returns the picture and the answer's `stencil` object."""
    body = {"seed": 1, "num_inference_steps": STEPS} | fields
    result = client.images.edit(image=PHOTO, mask=ALPHA, prompt="a red hat", extra_body=body)
    assert result.data
    return decode(base64.b64decode(result.data[0].b64_json or "")), result.stencil  # type: ignore[attr-defined]


def test_only_pixels_under_the_mask_are_painted(client: openai.OpenAI) -> None:
    picture, cold = edit(client)
    again, warm = edit(client)
    np.testing.assert_array_equal(again, picture)
    assert (cold["cache"], warm["cache"]) == ("miss", "hit")
    assert cold["num_inference_steps"] == STEPS
    assert 0 < cold["active_tokens"] < cold["image_tokens"]
    outside = np.ones(picture.shape[:2], bool)
    outside[BOX] = False
    np.testing.assert_array_equal(picture[outside][:, :3], PIXELS[outside])
    assert np.abs(picture[BOX][..., :3].astype(int) - PIXELS[BOX]).mean() > 10


def test_an_exact_edit_is_another_picture_that_repeats(client: openai.OpenAI) -> None:
    exact, report = edit(client, mask_aware=False)
    np.testing.assert_array_equal(exact, edit(client, mask_aware=False)[0])
    assert report["cache"] == "off"
    masked, _ = edit(client)
    assert (masked != exact).any()


@pytest.mark.parametrize("mask_aware", [True, False])
def test_every_parameter_counts(client: openai.OpenAI, mask_aware: bool) -> None:
    plain, _ = edit(client, mask_aware=mask_aware)
    for fields in ({"strength": 0.5}, {"guidance_scale": 2.0}, {"negative_prompt": "a hat"}, {"seed": 2}):
        changed, report = edit(client, mask_aware=mask_aware, **fields)
        assert report["ignored"] == []
        assert np.abs(changed.astype(int) - plain).max() > 0, fields


def test_strength_that_leaves_no_step_is_an_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="leaves no step to do"):
        edit(client, strength=0.2)


def test_edits_of_all_sizes_and_steps_share_batches_and_change_nothing(client: openai.OpenAI) -> None:
    exact = {"mask_aware": False}
    requests = [{}, exact | {"guidance_scale": 1.0}, exact, {"strength": 0.8}, {"num_inference_steps": 3}]
    alone = [edit(client, **request)[0] for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda request: edit(client, **request)[0], requests))
    for picture, before in zip(together, alone, strict=True):
        np.testing.assert_array_equal(picture, before)


def test_partial_images_come_before_the_picture(client: openai.OpenAI) -> None:
    body = {"seed": 1, "num_inference_steps": STEPS}
    stream = client.images.edit(
        image=PHOTO, mask=ALPHA, prompt="a red hat", stream=True, partial_images=1, extra_body=body
    )
    events = list(stream)
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
    np.testing.assert_array_equal(decode(base64.b64decode(events[-1].b64_json)), edit(client)[0])


def test_an_adapter_of_all_layers_paints_another_picture(client: openai.OpenAI) -> None:
    """For denoiser and text encoder, with pages of its own."""
    pictures = {name: edit(client, lora=name, seed=3)[0] for name in ("red", "")}
    assert np.abs(pictures["red"][BOX].astype(int) - pictures[""][BOX]).mean() > 5
    again, report = edit(client, lora="red", seed=3)
    np.testing.assert_array_equal(again, pictures["red"])
    assert report["cache"] == "hit"


def test_a_template_is_primed_ahead(server: ServerProcess) -> None:
    answer = httpx.post(f"{server.base_url}/templates", files={"image": ("photo.png", PHOTO)})
    assert answer.status_code == 200, answer.text
    assert answer.json()["page_bytes"] > 0
