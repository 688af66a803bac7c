"""A distilled FLUX.2-klein behind the API. Its denoiser sees the template where there is one."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
from hostile_files import BOMBS, bombs
from pictures import Pixels, decode, encode, photo
from served_edits import assert_cold_is_warm, client_of, edit, serving
from server_process import ServerProcess

from tools.random_checkpoints import make_klein


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with serving(make_klein(folder / "klein", is_distilled=True), folder) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
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


GROWTH_BYTES = 16 * 1024 * 1024
"""What all processes may grow by, together, while hostile references come a second time."""


def refusal_of(server: ServerProcess, *references: bytes) -> str:
    """The message of the 4xx that these references get; "": they are seen."""
    files = [("image[]", (f"{number}.png", file)) for number, file in enumerate([encode(photo()), *references])]
    answer = httpx.post(f"{server.base_url}/images/edits", data={"prompt": "a red hat"}, files=files, timeout=60)
    assert answer.status_code < 500, answer.text
    return "" if answer.status_code == 200 else str(answer.json()["error"]["message"])


def memory_of(server: ServerProcess) -> int:
    """Bytes of all its processes, in which shared memory counts once."""
    processes = [psutil.Process(server.process.pid), *server.children()]
    return sum(process.memory_full_info().pss for process in processes)


def test_hostile_references_are_refused_and_nothing_is_lost(server: ServerProcess, client: openai.OpenAI) -> None:
    """Some bombs are pictures: what expands is beside their pixels, and is not read."""
    before, _ = edit(client)
    files = bombs()
    used = []
    for _ in range(2):
        assert "at most 3" in refusal_of(server, *[files[name] for name in BOMBS][:5] * 3)
        bad = [name for name in BOMBS if "reference" in refusal_of(server, encode(photo(40, 40)), files[name])]
        assert len(bad) >= len(BOMBS) // 2
        for file in (b"text", encode(photo(40, 40))[:60], encode(photo(1, 300))):
            assert "reference" in refusal_of(server, file)
        used.append(memory_of(server))
    np.testing.assert_array_equal(edit(client)[0], before)
    assert used[1] - used[0] < GROWTH_BYTES
