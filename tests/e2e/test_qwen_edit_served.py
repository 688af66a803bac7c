"""Qwen-Image-Edit behind the API, where prompts are embedded with the picture they are for."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from pictures import BOX, Pixels, alpha_mask, decode, encode, photo
from server_process import ServerProcess, start

from tools.random_checkpoints import make_qwen_edit

STEPS = 4
PHOTO, ALPHA = encode(photo()), alpha_mask()
GUIDED = {"negative_prompt": "a hat"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    checkpoint = make_qwen_edit(tmp_path_factory.mktemp("model") / "qwen")
    flags = ("--served-model-name", "tiny", "--threads", "1", "--dtype", "float32")
    server = start(tmp_path_factory.mktemp("server") / "scratch", "--model", str(checkpoint), *flags)
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


def edit(client: openai.OpenAI, image: bytes = PHOTO, prompt: str = "a red hat", **fields: Any) -> tuple[Pixels, Any]:
    """The picture, and what the server says of it."""
    body = {"seed": 1, "num_inference_steps": STEPS} | fields
    mask = ALPHA if image is PHOTO else openai.omit
    result = client.images.edit(image=image, mask=mask, prompt=prompt, extra_body=body)
    assert result.data
    return decode(base64.b64decode(result.data[0].b64_json or "")), result.stencil  # type: ignore[attr-defined]


def test_a_masked_edit_starts_cold_and_is_the_same_warm(client: openai.OpenAI) -> None:
    first, cold = edit(client)
    again, warm = edit(client)
    np.testing.assert_array_equal(again, first)
    assert (cold["cache"], warm["cache"]) == ("miss", "hit")
    outside = np.ones(first.shape[:2], bool)
    outside[BOX] = False
    np.testing.assert_array_equal(first[outside][:, :3], photo()[outside])
    assert np.abs(first[BOX][..., :3].astype(int) - photo()[BOX]).mean() > 10


def test_a_negative_prompt_alone_guides(client: openai.OpenAI) -> None:
    for mask_aware in (True, False):
        plain, _ = edit(client, mask_aware=mask_aware)
        guided, report = edit(client, mask_aware=mask_aware, **GUIDED)
        stronger, _ = edit(client, mask_aware=mask_aware, **GUIDED, true_cfg_scale=8.0)
        assert report["ignored"] == []
        assert (guided != plain).any()
        assert (stronger != guided).any()


def test_prompts_of_any_length_share_batches_and_change_nothing(client: openai.OpenAI) -> None:
    requests = [{}, {"prompt": "a hat " * 90} | GUIDED, {"prompt": "<|image_pad|><|im_end|>"}, {"strength": 0.6}]
    alone = [edit(client, **request) for request in requests]
    assert [report["prompt_truncated"] for _, report in alone] == [False, True, False, False]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda request: edit(client, **request)[0], requests))
    for picture, (before, _) in zip(together, alone, strict=True):
        np.testing.assert_array_equal(picture, before)


def test_the_longest_picture_is_edited(client: openai.OpenAI) -> None:
    """The processor of the text encoder would refuse it."""
    long = np.zeros((1, 300, 4), np.uint8)
    long[:, :150, 3] = 255
    picture, _ = edit(client, image=encode(long))
    assert picture.shape[:2] == (1, 300)
