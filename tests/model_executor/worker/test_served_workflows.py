"""Requests of several workflows and served models, from the client's preparation to their pictures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import numpy as np
import pytest
from edits import box_mask, picture
from hires_rig import file_of
from one_process import Files, OneProcess
from safetensors.torch import load_file, save_file
from three_pass import THREE_PASS

from core.config import ModelConfig
from core.errors import InvalidRequestError
from core.graph.catalog import WORKFLOWS
from core.messages.specs import EditSpec, GenerationSpec
from core.sampling_params import SamplingParams
from model_executor.worker.loading.resident import ResidentModels
from tools.random_checkpoints import make_flux_fill

SIDE = 96
SAMPLING = SamplingParams(num_inference_steps=4, guidance_scale=30.0, seed=3)
TWICE = SamplingParams(num_inference_steps=4, guidance_scale=30.0, seed=3, hires_scale=3.0, hires_strength=0.75)
FILES = file_of(picture(7, (SIDE, SIDE))), file_of(box_mask((SIDE, SIDE)) * 255)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ResidentModels:
    """A checkpoint, and another one that has all but the VAE of it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    plain, twin = make_flux_fill(folder / "plain"), folder / "twin"
    shutil.copytree(plain, twin)
    weights = next((twin / "vae").glob("*.safetensors"))
    save_file({name: tensor * 1.1 for name, tensor in load_file(weights).items()}, weights)
    paths = {"plain": plain, "twin": twin}
    configs = [ModelConfig(model=str(path), served_model_name=name, dtype="float32") for name, path in paths.items()]
    opened = ResidentModels.open(configs)
    opened.load_all()
    return opened


@pytest.fixture
def engine(models: ResidentModels) -> Iterator[OneProcess]:
    engine = OneProcess(models)
    yield engine
    engine.close()


def test_models_that_share_a_denoiser_share_its_steps_and_make_their_own_pictures(engine: OneProcess) -> None:
    """Bit for bit as alone: each item's own family encodes, guides, advances and decodes."""
    names = ["plain", "twin", "plain", "twin"]
    alone = [engine.run(engine.request(f"alone{n}", name, SAMPLING, FILES))[0] for n, name in enumerate(names)]
    assert not np.array_equal(alone[0], alone[1]), "they differ in their VAEs"
    engine.batches.clear()
    together = engine.run(*(engine.request(f"r{n}", name, SAMPLING, FILES) for n, name in enumerate(names)))
    assert all(np.array_equal(one, other) for one, other in zip(together, alone, strict=True))
    mixed = [batch for batch in engine.batches if {item.model for item in batch.items} == {"plain", "twin"}]
    assert sum(batch.op == "denoise" for batch in mixed) == engine.scheduler.stats().mixed_steps >= 3
    assert not any(batch.op in ("image_encode", "decode") for batch in mixed), "each has a VAE of its own"


def test_a_generation_is_an_edit_of_an_empty_canvas(engine: OneProcess) -> None:
    grey = np.full((SIDE, SIDE, 3), 128, np.uint8)
    empty = engine.request("edit", "plain", SAMPLING, (file_of(grey), file_of(np.full_like(grey[..., 0], 255))), SIDE)
    nothing = engine.request("nothing", "plain", SAMPLING, side=SIDE)
    assert isinstance(empty.spec, EditSpec)
    assert isinstance(nothing.spec, GenerationSpec)
    assert np.array_equal(*engine.run(empty, nothing))


@pytest.mark.parametrize("files", [None, FILES], ids=["generation", "edit"])
def test_a_workflow_of_three_passes_is_one_file_and_one_line(
    models: ResidentModels, monkeypatch: pytest.MonkeyPatch, files: Files | None
) -> None:
    monkeypatch.setitem(WORKFLOWS, THREE_PASS.name, THREE_PASS)
    engine = OneProcess(models, {"twin": {"workflow": THREE_PASS.name}})
    request = engine.request("r", "twin", TWICE, files, SIDE)
    assert (request.workflow, request.rounds) == ("three_pass", (4, 3, 2))
    assert {name: canvas.width for name, canvas in request.spec.canvases.items()} == {"small": 32, "middle": 64}
    (made,) = engine.run(request)
    sizes = [(item.work.width, item.node) for batch in engine.batches for item in batch.items if batch.op == "denoise"]  # type: ignore[attr-defined]
    assert sizes == [(32, "small_denoise")] * 4 + [(64, "middle_denoise")] * 3 + [(96, "denoise")] * 2
    assert made.shape == (SIDE, SIDE, 3)
    assert np.array_equal(made, engine.run(engine.request("again", "twin", TWICE, files, SIDE))[0])
    other = engine.run(engine.request("two", "plain", TWICE, files, SIDE))[0]
    assert not np.array_equal(made, other), "which is served by the workflow hires"
    engine.close()


def test_a_served_model_of_one_workflow_takes_no_other(models: ResidentModels) -> None:
    engine = OneProcess(models, {"twin": {"workflow": "hires"}})
    with pytest.raises(InvalidRequestError, match="'twin' makes no pictures without it") as caught:
        engine.request("r", "twin", SAMPLING)
    assert caught.value.param == "hires_scale"
    engine.close()


def test_previews_come_from_the_last_pass(engine: OneProcess) -> None:
    request = engine.request("r", "plain", TWICE, FILES, SIDE)
    engine.run(request)
    assert len(request.spec.previews) == 1
    shown = [item.node for batch in engine.batches for item in batch.items if batch.op == "decode"]
    assert shown == ["preview", "decode"]
