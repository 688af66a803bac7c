"""Servers with a quantised denoiser (torchao on a CPU): a transformer and a UNet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from adapters import make_lora
from pictures import alpha_mask, encode, photo
from served_edits import assert_company_changes_nothing, client_of, serving
from server_process import ServerProcess

from tools.random_checkpoints import make_sd3
from tools.random_unet_checkpoints import make_sdxl

SIDE = 128  # a picture of 16 of a UNet's tokens, of which the mask leaves some alone


@pytest.fixture(scope="module", params=[make_sd3, make_sdxl])
def quantized_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    pytest.importorskip("torchao")
    folder = tmp_path_factory.mktemp("server")
    checkpoint = request.param(folder / "model")
    lora = make_lora(folder / "shirt.safetensors", checkpoint)
    with serving(checkpoint, folder, "--quantization", "torchao-int8", "--lora", f"shirt={lora}") as server:
        yield server


def test_edits_in_a_batch_equal_those_made_alone(quantized_server: ServerProcess) -> None:
    """Mask-aware and exact, with an adapter and without; the log has no warnings about the package."""
    wanted: list[dict[str, Any]] = [
        {},
        {"mask_aware": False},
        {"lora": "shirt"},
        {"guidance_scale": 3.0},
        {"num_inference_steps": 3},
    ]
    picture = {"image": encode(photo(SIDE, SIDE)), "mask": alpha_mask(SIDE, SIDE)}
    wanted = [picture | each for each in wanted]
    with client_of(quantized_server) as client:
        alone, together = assert_company_changes_nothing(client, wanted)
    assert len({picture.tobytes() for picture, _ in alone}) == len(wanted)
    assert [report["cache"] for _, report in alone] == ["miss", "off", "miss", "hit", "hit"]
    assert [report["cache"] for _, report in together] == ["hit", "off", "hit", "hit", "hit"]
    said = quantized_server.log.read_text()
    assert "Failed to load" not in said
    assert "pytree" not in said
