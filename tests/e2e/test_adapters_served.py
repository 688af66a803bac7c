"""A server with LoRA adapters: the field, the list of models, several adapters at once, templates."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from adapters import make_lora
from pictures import decode, encode, photo
from served_edits import ALPHA, PHOTO, assert_company_changes_nothing, client_of, edit, serving
from server_process import ServerProcess

from core.sampling_params import SamplingParams
from entrypoints.image_engine import Edit, ImageEngine
from tools.random_checkpoints import make_sd3

WEAK = {"name": "hat", "scale": 0.5}
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"lora": "shirt"},
    {"lora": "hat"},
    {"lora": WEAK},
    {"lora": [WEAK, {"name": "shirt", "scale": -0.7}]},
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoint, and two adapters for it."""
    folder = tmp_path_factory.mktemp("model")
    checkpoint = make_sd3(folder / "sd3")
    shirt = make_lora(folder / "shirt.safetensors", checkpoint)
    hat = make_lora(folder / "hat" / "pytorch_lora_weights.safetensors", checkpoint, r".*attn\..*", seed=2).parent
    few = {"num_inference_steps": "3", "guidance_scale": "1", "shift": "5"}
    fast = make_lora(folder / "fast.safetensors", checkpoint, r".*ff\..*", seed=3, metadata=few)
    return {"checkpoint": checkpoint, "shirt": shirt, "hat": hat, "fast": fast}


@pytest.fixture(scope="module")
def adapted_server(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    adapters = [flag for name in ("shirt", "hat", "fast") for flag in ("--lora", f"{name}={files[name]}")]
    with serving(files["checkpoint"], tmp_path_factory.mktemp("server"), *adapters) as server:
        yield server


@pytest.fixture
def client(adapted_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with client_of(adapted_server) as client:
        yield client


def in_form(choice: dict[str, Any]) -> dict[str, Any]:
    """The field as a form has it: a name, or JSON."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in choice.items()}


@pytest.mark.parametrize("mask_aware", [True, False])
def test_adapters_at_once_paint_what_each_paints_alone(client: openai.OpenAI, mask_aware: bool) -> None:
    wanted = [in_form(choice) | {"mask_aware": mask_aware} for choice in CHOICES]
    alone, _ = assert_company_changes_nothing(client, wanted, times=2)
    assert len({picture.tobytes() for picture, _ in alone}) == len(CHOICES)


def test_an_adapter_brings_its_settings_unless_the_request_has_its_own(client: openai.OpenAI) -> None:
    wanted: list[dict[str, Any]] = [
        {"lora": "fast", "num_inference_steps": openai.omit},
        {"lora": "fast", "num_inference_steps": 4, "shift": 2, "guidance_scale": 3},
        {"num_inference_steps": 4},
        {"num_inference_steps": 3, "shift": 5, "guidance_scale": 1},
    ]
    alone, _ = assert_company_changes_nothing(client, wanted)
    told = [
        tuple(report[name] for name in ("num_inference_steps", "shift", "guidance_scale", "sigmas", "true_cfg_scale"))
        for _, report in alone
    ]
    assert told == [(3, 5, 1, None, None), (4, 2, 3, None, None), (4, None, 7, None, None), (3, 5, 1, None, None)]
    with pytest.raises(openai.BadRequestError, match="'shift'"):
        edit(client, shift=101)


def test_an_unknown_adapter_is_named_with_those_there_are(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"'dress'.*Supported values are: 'shirt', 'hat', 'fast'"
    ) as caught:
        edit(client, lora="dress")
    assert caught.value.param == "lora"


def test_adapters_are_models_whose_parent_is_the_checkpoint(client: openai.OpenAI) -> None:
    parents = {model.id: model.parent for model in client.models.list()}  # type: ignore[attr-defined]
    assert parents == {"tiny": None, "shirt": "tiny", "hat": "tiny", "fast": "tiny"}
    by_lora, _ = edit(client, lora="hat")
    result = client.images.edit(
        model="hat", image=PHOTO, mask=ALPHA, prompt="a red hat", extra_body={"seed": 1, "num_inference_steps": 4}
    )
    assert result.data
    np.testing.assert_array_equal(decode(base64.b64decode(result.data[0].b64_json or "")), by_lora)


def test_a_template_is_primed_for_its_adapter_and_goes_with_all_of_them(
    client: openai.OpenAI, adapted_server: ServerProcess
) -> None:
    dark = encode(photo() // 2)
    answer = httpx.post(f"{adapted_server.base_url}/templates", data={"lora": "shirt"}, files={"image": dark})
    template = answer.json()
    assert template["primed"]
    report = {choice: edit(client, template_id=template["id"], lora=choice)[1] for choice in ("shirt", "hat", "")}
    assert [report[choice]["cache"] for choice in report] == ["hit", "miss", "miss"]
    again = [edit(client, dark, lora=choice)[1]["cache"] for choice in report]
    assert again == ["hit"] * 3
    assert httpx.delete(f"{adapted_server.base_url}/templates/{template['id']}").json()["deleted"]
    again = [edit(client, dark, lora=choice)[1]["cache"] for choice in report]
    assert again == ["miss"] * 3


def test_offline_edits_equal_the_servers(client: openai.OpenAI, files: dict[str, Path]) -> None:
    loras = {name: files[name] for name in ("shirt", "hat")}
    edits = [Edit(prompt="a red hat", image=PHOTO, mask=ALPHA, **choice) for choice in (*CHOICES, {"lora": "dress"})]
    with ImageEngine(str(files["checkpoint"]), dtype="float32", threads=1, loras=loras) as engine:
        *results, refused = engine.generate(edits, SamplingParams(seed=1, num_inference_steps=4), use_tqdm=False)
    for result, choice in zip(results, CHOICES, strict=True):
        np.testing.assert_array_equal(
            np.asarray(result.images[0])[..., :3], edit(client, **in_form(choice))[0][..., :3]
        )
    assert "Supported values are: 'shirt', 'hat'" in str(refused.error)
