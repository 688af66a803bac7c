"""A distilled FLUX.2-klein behind the API. Its denoiser sees the template where there is one."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from pictures import Pixels, decode
from served_edits import assert_cold_is_warm, client_of, edit, serving

from tools.random_checkpoints import make_klein


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("server")
    checkpoint = make_klein(folder / "klein", is_distilled=True)
    with serving(checkpoint, folder) as server, client_of(server) as client:
        yield client


def generate(client: openai.OpenAI) -> Pixels:
    result = client.images.generate(prompt="a red hat", extra_body={"seed": 1})
    assert result.data
    assert result.stencil["num_inference_steps"] == 4  # type: ignore[attr-defined]
    return decode(base64.b64decode(result.data[0].b64_json or ""))


def test_a_masked_edit_starts_cold_and_is_the_same_warm(client: openai.OpenAI) -> None:
    assert_cold_is_warm(client)


def test_fields_of_guidance_are_named_and_change_nothing(client: openai.OpenAI) -> None:
    fields = {"guidance_scale": 7.0, "negative_prompt": "a coat", "true_cfg_scale": 2.0}
    guided, report = edit(client, **fields)
    assert set(report["ignored"]) == {*fields}
    np.testing.assert_array_equal(guided, edit(client)[0])


def test_pictures_of_nothing_and_edits_share_steps_and_change_nothing(client: openai.OpenAI) -> None:
    """Masked, of the whole picture, and without a template."""
    wanted: list[dict[str, Any]] = [{}, {"mask_aware": False}, {"strength": 0.6}]
    made, alone = generate(client), [edit(client, **each)[0] for each in wanted]
    assert made.std() > 10
    with ThreadPoolExecutor(4) as pool:
        generated = pool.submit(generate, client)
        together = list(pool.map(lambda each: edit(client, **each)[0], wanted))
    np.testing.assert_array_equal(generated.result(), made)
    for picture, before in zip(together, alone, strict=True):
        np.testing.assert_array_equal(picture, before)
