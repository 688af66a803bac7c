"""A server whose transformer is quantised, by torchao on a CPU."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from adapters import make_lora
from pictures import Pixels, alpha_mask, decode, encode, photo
from server_process import ServerProcess, start

from tools.random_checkpoints import make_sd3

PHOTO, ALPHA = encode(photo()), alpha_mask()


@pytest.fixture(scope="module")
def quantized_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    pytest.importorskip("torchao")
    folder = tmp_path_factory.mktemp("model")
    checkpoint = make_sd3(folder / "sd3")
    lora = make_lora(folder / "shirt.safetensors", checkpoint)
    flags = ("--model", str(checkpoint), "--quantization", "torchao-int8", "--lora", f"shirt={lora}")
    server = start(folder / "scratch", *flags, "--threads", "1", "--dtype", "float32", "--no-playground")
    yield server
    assert server.stop() == 0, server.log.read_text()


def edit(client: openai.OpenAI, **fields: Any) -> tuple[Pixels, str]:
    """The picture, and whether its pages were there."""
    body = {"seed": 1, "num_inference_steps": 4} | fields
    result = client.images.edit(image=PHOTO, mask=ALPHA, prompt="a red hat", extra_body=body)
    assert result.data
    return decode(base64.b64decode(result.data[0].b64_json or "")), result.stencil["cache"]  # type: ignore[attr-defined]


def test_edits_in_company_paint_what_each_paints_alone(quantized_server: ServerProcess) -> None:
    """Mask-aware and exact, with an adapter and without; and the log has nothing to say of the package."""
    wanted: list[dict[str, Any]] = [
        {},
        {"mask_aware": False},
        {"lora": "shirt"},
        {"guidance_scale": 3.0},
        {"num_inference_steps": 3},
    ]
    with openai.OpenAI(base_url=quantized_server.base_url, api_key="none", max_retries=0) as client:
        alone = [edit(client, **each) for each in wanted]
        with ThreadPoolExecutor(len(wanted)) as pool:
            together = list(pool.map(lambda each: edit(client, **each), wanted))
    assert [cache for _, cache in alone] == ["miss", "off", "miss", "hit", "hit"]
    assert [cache for _, cache in together] == ["hit", "off", "hit", "hit", "hit"]
    for (picture, _), (before, _) in zip(together, alone, strict=True):
        np.testing.assert_array_equal(picture, before)
    assert len({picture.tobytes() for picture, _ in alone}) == len(wanted)
    said = quantized_server.log.read_text()
    assert "Failed to load" not in said
    assert "pytree" not in said
