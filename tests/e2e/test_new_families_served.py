"""FLUX.1 Kontext, Qwen-Image-Edit-Plus and Z-Image behind one API: pictures made of nothing, and edits with and
without a mask."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from pictures import BOX, Pixels, alpha_mask, decode, encode, photo
from served_edits import client_of, edit
from server_process import fork

from tools.random_checkpoints import make_flux_kontext, make_qwen_edit_plus, make_z_image

MAKERS = {"kontext": make_flux_kontext, "plus": make_qwen_edit_plus, "z-image": make_z_image}
USELESS = {"kontext": "guidance_scale", "plus": "guidance_scale", "z-image": "true_cfg_scale"}
"""Model -> a field that it cannot use: guidance is not distilled into these, or is classifier-free."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder: Path = tmp_path_factory.mktemp("server")
    catalog = folder / "models.toml"
    entries = (f'[[model]]\nname = "{name}"\npath = "{make(folder / name)}"\n' for name, make in MAKERS.items())
    catalog.write_text("".join(entries))
    flags = ("--catalog", str(catalog), "--threads", "1", "--dtype", "float32", "--no-playground")
    server = fork(folder / "scratch", *flags)
    with client_of(server) as client:
        yield client
    assert server.stop() == 0, server.log.read_text()


@pytest.mark.parametrize("model", MAKERS)
def test_a_picture_is_made_of_nothing(client: openai.OpenAI, model: str) -> None:
    options = {"seed": 1, "num_inference_steps": 2, USELESS[model]: 3.0}
    result = client.images.generate(model=model, prompt="a red hat", extra_body=options)
    assert result.data
    assert decode(base64.b64decode(result.data[0].b64_json or "")).std() > 10
    assert result.stencil["ignored"] == [USELESS[model]]  # type: ignore[attr-defined]


def with_references(client: openai.OpenAI, model: str, number: int) -> tuple[Pixels, dict[str, Any], int]:
    """An edit with this many references; also its image tokens by `usage`."""
    pictures = [encode(photo(seed=5 + seed)) for seed in range(1 + number)]
    options = {"seed": 1, "num_inference_steps": 2}
    result = client.images.edit(image=pictures, mask=alpha_mask(), model=model, prompt="a hat", extra_body=options)
    assert result.data
    assert result.usage
    tokens = result.usage.input_tokens_details.image_tokens
    return decode(base64.b64decode(result.data[0].b64_json or "")), result.stencil, tokens  # type: ignore[attr-defined]


def test_a_reference_is_seen_and_cached(client: openai.OpenAI) -> None:
    plain, *_ = with_references(client, "kontext", 0)
    cold, first, tokens = with_references(client, "kontext", 1)
    warm, again, _ = with_references(client, "kontext", 1)
    assert not np.array_equal(plain, cold)
    np.testing.assert_array_equal(warm, cold)
    assert (first["cache"], again["cache"], first["ignored"]) == ("miss", "hit", [])
    assert tokens > first["image_tokens"]


def test_references_that_a_model_cannot_see(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="kontext sees at most 1 beside the picture to edit, not 2"):
        with_references(client, "kontext", 2)
    pictures = [encode(photo(seed=seed)) for seed in range(2)]
    with pytest.raises(openai.BadRequestError, match="kontext sees it in place of the picture, of which nothing"):
        client.images.edit(image=pictures, model="kontext", prompt="a hat")
    _, stencil, _ = with_references(client, "z-image", 1)
    assert stencil["ignored"] == ["image[1]"]


@pytest.mark.parametrize("model", MAKERS)
def test_edits_with_and_without_a_mask(client: openai.OpenAI, model: str) -> None:
    """A masked one keeps what is outside, and is the same over its pages; the other one says that
    every token was computed."""
    options = {"model": model, "num_inference_steps": 2}
    cold, first = edit(client, **options)
    warm, again = edit(client, **options)
    np.testing.assert_array_equal(warm, cold)
    assert (first["cache"], again["cache"]) == ("miss", "hit")
    outside = np.ones(cold.shape[:2], bool)
    outside[BOX] = False
    np.testing.assert_array_equal(cold[outside][:, :3], photo()[outside])
    whole, report = edit(client, encode(photo()), mask=None, **options, **{USELESS[model]: 3.0})
    assert report["ignored"] == [USELESS[model]]
    assert (report["cache"], report["active_tokens"], report["full_steps"]) == ("off", report["image_tokens"], 2)
    assert "the whole image was regenerated" in report["notes"][0]
    assert (whole[outside][:, :3] != photo()[outside]).any()
