"""A base model with a refiner: through an engine offline and behind the API, against diffusers' composition."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from pictures import Pixels, decode, encode
from pipeline_rig import PROMPT
from refined_rig import GUIDANCE, SEED, SOLVERS, Asked, Composition
from served_edits import client_of
from server_process import ServerProcess, fork

from core.config import ModelConfig, RequestDefaults
from core.errors import InvalidRequestError
from core.sampling_params import SamplingParams
from entrypoints import Edit, ImageEngine

EDIT, GENERATION = Asked(5, 0.6, is_edit=True), Asked(5, 0.6, is_edit=False)
COMMON: dict[str, Any] = {"dtype": "float32", "threads": 1}


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Composition:
    return Composition(tmp_path_factory.mktemp("models"), SOLVERS["euler"], SOLVERS["ancestral"])


def assert_close(ours: Pixels, asked: Asked, composed: Composition) -> None:
    """Inside the mask; outside it the upload is pasted back."""
    inside = asked.mask > 0
    assert np.abs(ours[..., :3].astype(int) - composed.picture(asked))[inside].max() <= 2
    np.testing.assert_array_equal(ours[~inside][:, :3], asked.template[~inside])


# --------------------------------------------------------------------------------------------------------- offline


def test_an_engine_offline_makes_the_compositions_pictures(composed: Composition) -> None:
    base, refiner = map(str, composed.paths)
    defaults = RequestDefaults(num_inference_steps=5, guidance_scale=GUIDANCE, refiner_start=0.6)
    models = [
        ModelConfig(model=base, served_model_name="base", refiner="polish", defaults=defaults, **COMMON),
        ModelConfig(model=refiner, served_model_name="polish", **COMMON),
    ]
    edit = Edit(prompt=PROMPT, image=EDIT.template, mask_image=EDIT.mask * 255)
    edits = [edit, Edit(prompt=PROMPT, size=GENERATION.size)]
    with ImageEngine(models=models, image_workers=1) as engine:
        results = engine.generate(edits, SamplingParams(seed=SEED), use_tqdm=False)
        (one_step,) = engine.generate([edit], SamplingParams(seed=SEED, num_inference_steps=1), use_tqdm=False)
        polish = Edit(prompt=PROMPT, image=EDIT.template, model="polish")
        (refused,) = engine.generate([polish], SamplingParams(refiner_start=0.5), use_tqdm=False)
    for result, asked in zip(results, (EDIT, GENERATION), strict=True):
        assert_close(np.asarray(result.images[0]), asked, composed)
        (report,) = result.reports
        assert (report.exact_reason, report.num_inference_steps) == ("refined", 5)
    assert one_step.error is None
    assert isinstance(refused.error, InvalidRequestError)
    assert refused.error.param == "refiner_start"


# ------------------------------------------------------------------------------------------------------------- API


@pytest.fixture(scope="module")
def client(composed: Composition, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Of a server whose first model is the refiner, so that the other one comes later."""
    folder = tmp_path_factory.mktemp("server")
    catalog = folder / "models.toml"
    catalog.write_text(
        f"""
        [[model]]
        name = "polish"
        path = "{composed.paths[1]}"

        [[model]]
        name = "base"
        path = "{composed.paths[0]}"
        refiner = "polish"
        defaults = {{ num_inference_steps = 5, guidance_scale = {GUIDANCE} }}
        """
    )
    flags = ("--catalog", str(catalog), "--threads", "1", "--dtype", "float32", "--no-playground")
    server: ServerProcess = fork(folder / "scratch", *flags)
    with client_of(server) as client:
        yield client
    assert server.stop() == 0, server.log.read_text()


def pixels_of(item: Any) -> Pixels:
    return decode(base64.b64decode(item.b64_json))


def test_edits_and_generations_over_http_equal_the_composition(client: openai.OpenAI, composed: Composition) -> None:
    extra = {"seed": SEED, "refiner_start": 0.6}
    fields: dict[str, Any] = {"model": "base", "prompt": PROMPT, "stream": True, "partial_images": 1}
    mask = np.dstack([EDIT.template, (1 - EDIT.mask) * 255])
    files = {"image": encode(EDIT.template), "mask": encode(mask)}
    with client.images.edit(**files, **fields, extra_body=extra) as stream:
        partial, edited = stream
    assert partial.type == "image_edit.partial_image"
    assert_close(pixels_of(edited), EDIT, composed)
    report = edited.stencil
    assert (report["num_inference_steps"], report["steps_computed"], report["ignored"]) == (5, 5, [])
    assert report["notes"] == ["Every token was computed: pictures of a model with a refiner run exact."]
    width, height = GENERATION.size
    made = client.images.generate(
        model="base",
        prompt=PROMPT,
        size=f"{width}x{height}",
        extra_body=extra,  # type: ignore[arg-type]
    )
    assert made.data
    assert_close(pixels_of(made.data[0]), GENERATION, composed)


def test_a_model_without_a_refiner_refuses_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(model="polish", prompt=PROMPT, extra_body={"refiner_start": 0.5})
    assert caught.value.param == "refiner_start"
