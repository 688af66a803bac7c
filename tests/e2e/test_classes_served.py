"""A class-conditional DiT beside a model with prompts, behind the API and offline."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from diffusers import DiTPipeline, DPMSolverMultistepScheduler
from pictures import Pixels, decode, encode, photo
from served_edits import client_of
from server_process import ServerProcess, fork

from core.errors import InvalidRequestError
from entrypoints import Edit, ImageEngine, SamplingParams
from tools.random_checkpoints import make_flux_fill
from tools.random_dit_checkpoints import make_dit

LABEL = 207
STEPS = 4
PHOTO = encode(photo())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "dit"
    return make_dit(path, scheduler_class=DPMSolverMultistepScheduler, scheduler={})


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    models = ("--model", f"dit={checkpoint}", "--model", f"fill={make_flux_fill(folder / 'fill')}")
    server = fork(folder / "scratch", *models, "--threads", "1", "--dtype", "float32", "--no-playground")
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def generate(client: openai.OpenAI, prompt: str = "", size: Any = "auto", **fields: Any) -> tuple[Pixels, Any]:
    """Make a picture; returns it and the answer's `stencil` object."""
    body = {"seed": 1, "num_inference_steps": STEPS} | fields
    result = client.images.generate(model="dit", prompt=prompt, size=size, extra_body=body)
    assert result.data
    return decode(base64.b64decode(result.data[0].b64_json or "")), result.stencil  # type: ignore[attr-defined]


def test_a_picture_is_the_pipelines(client: openai.OpenAI, checkpoint: Path) -> None:
    picture, report = generate(client, class_label=LABEL)
    pipeline = DiTPipeline.from_pretrained(checkpoint)
    (expected,) = pipeline([LABEL], num_inference_steps=STEPS, generator=torch.manual_seed(1)).images
    assert np.abs(picture[..., :3].astype(int) - np.asarray(expected)).max() <= 2
    assert (report["ignored"], report["guidance_scale"], report["steps_computed"]) == ([], 4.0, STEPS)
    assert report["ms"]["denoise"] > 0


def test_names_mean_the_same_as_numbers(client: openai.OpenAI, server: ServerProcess) -> None:
    expected, _ = generate(client, class_label=LABEL)
    for prompt, fields in (
        ("", {"class_label": "golden retriever"}),
        ("golden retriever", {}),
        ("", {"class_label": "207"}),
    ):
        np.testing.assert_array_equal(generate(client, prompt, **fields)[0], expected)
    body = {"class_label": LABEL, "seed": 1, "num_inference_steps": STEPS}  # the first model, and no prompt
    answer = httpx.post(f"{server.base_url}/images/generations", json=body).json()
    np.testing.assert_array_equal(decode(base64.b64decode(answer["data"][0]["b64_json"])), expected)


def test_every_field_counts(client: openai.OpenAI) -> None:
    plain, _ = generate(client, class_label=LABEL)
    for fields in ({"class_label": 1}, {"guidance_scale": 1.0}, {"seed": 2}, {"num_inference_steps": 6}):
        assert (generate(client, **{"class_label": LABEL} | fields)[0] != plain).any(), fields
    for ignored in ({"negative_prompt": "a hat"}, {"strength": 0.3}, {"mask_margin": 3}):
        picture, report = generate(client, class_label=LABEL, **ignored)
        np.testing.assert_array_equal(picture, plain)
        assert report["ignored"] == [*ignored]


def test_company_changes_nothing(client: openai.OpenAI) -> None:
    """Of other classes, steps and guidance; and of edits by the other model."""
    wanted: list[Mapping[str, Any]] = [
        {"class_label": 1},
        {"class_label": 2, "guidance_scale": 1.0, "num_inference_steps": 30},
        {"class_label": LABEL, "guidance_scale": 7.5, "num_inference_steps": 20},
        {"class_label": 999, "num_inference_steps": 25},
    ]
    alone = [generate(client, **each)[0] for each in wanted]
    with ThreadPoolExecutor(len(wanted) + 1) as pool:
        other = pool.submit(client.images.edit, model="fill", image=PHOTO, prompt="a red hat")
        for picture, before in zip(pool.map(lambda each: generate(client, **each)[0], wanted), alone, strict=True):
            np.testing.assert_array_equal(picture, before)
        assert other.result().data


def test_sizes_are_made_of_the_models_own(client: openai.OpenAI) -> None:
    for size, side in (("auto", 64), ("64x64", 64), ("200x200", 200)):
        assert generate(client, size=size, class_label=LABEL)[0].shape[:2] == (side, side)


def test_partial_images_come_before_the_picture(client: openai.OpenAI) -> None:
    body = {"seed": 1, "num_inference_steps": STEPS, "class_label": LABEL}
    events = list(client.images.generate(model="dit", prompt="", stream=True, partial_images=1, extra_body=body))
    assert [event.type for event in events] == ["image_generation.partial_image", "image_generation.completed"]
    np.testing.assert_array_equal(decode(base64.b64decode(events[-1].b64_json)), generate(client, class_label=LABEL)[0])


@pytest.mark.parametrize(
    ("model", "fields", "told"),
    [
        ("dit", {}, "Missing required parameter: 'class_label'"),
        ("dit", {"class_label": 1000}, "<= 999"),
        ("dit", {"class_label": "pike"}, "no class named 'pike'"),
        ("dit", {"class_label": 1, "size": "128x64"}, "a square"),
        ("dit", {"class_label": 1, "hires_scale": 2.0}, "hires_scale"),
        ("fill", {"prompt": "a hat", "class_label": 1}, "leave 'class_label' out"),
    ],
)
def test_what_a_model_cannot_make_is_refused(client: openai.OpenAI, model: str, fields: Any, told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=told):
        client.images.generate(**{"model": model, "prompt": "", "extra_body": fields})


def test_edits_and_templates_are_refused(client: openai.OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="edits none: use /v1/images/generations"):
        client.images.edit(model="dit", image=PHOTO, prompt="", extra_body={"class_label": 1})
    answer = httpx.post(f"{server.base_url}/templates", files={"image": ("photo.png", PHOTO)}, data={"model": "dit"})
    assert answer.status_code == 400
    assert "edits none" in answer.json()["error"]["message"]


def test_pictures_do_not_depend_on_the_degree(client: openai.OpenAI, checkpoint: Path) -> None:
    """Of one rank, the server's, and of 2 and 3: with two rows, which two ranks share, and with one, whose tokens they
    share.
    """
    labels, all_steps, scales = (1, LABEL, 5), (4, 5, 4), (1.0, 4.0, 2.0)
    edits = [Edit(class_label=label) for label in labels]
    samplings = [
        SamplingParams(seed=3, num_inference_steps=steps, guidance_scale=scale)
        for steps, scale in zip(all_steps, scales, strict=True)
    ]
    made = [
        generate(client, class_label=label, seed=3, num_inference_steps=steps, guidance_scale=scale)[0]
        for label, steps, scale in zip(labels, all_steps, scales, strict=True)
    ]
    for degree in (2, 3):
        with ImageEngine(str(checkpoint), dtype="float32", workers_per_engine=degree, degree=degree) as engine:
            alone = [engine.generate([e], [s], use_tqdm=False)[0] for e, s in zip(edits, samplings, strict=True)]
            together = engine.generate(edits, samplings, use_tqdm=False)
        assert {max(result.reports[0].degrees) for result in alone} == {degree}
        for results in (alone, together):
            for result, expected in zip(results, made, strict=True):
                np.testing.assert_array_equal(np.asarray(result.images[0]), expected)


def test_offline_edits_are_refused_one_by_one(checkpoint: Path) -> None:
    with ImageEngine(str(checkpoint), dtype="float32") as engine:
        made, edit, unnamed = engine.generate(
            [Edit(prompt="goldfish"), Edit(class_label=1, image=photo()), Edit(prompt="a hat")],
            SamplingParams(num_inference_steps=2, seed=1),
            use_tqdm=False,
        )
    assert made.images[0].size == (64, 64)
    for refused in (edit, unnamed):
        assert isinstance(refused.error, InvalidRequestError)
    with pytest.raises(InvalidRequestError, match="empty string"):
        Edit()
