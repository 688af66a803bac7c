"""Approximate caching in families of other layouts than FLUX's: a run goes on with a kept state as the run that has
kept it did."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from edits import picture
from hires_rig import file_of
from one_process import Files, OneProcess

from core.config import ModelConfig
from core.graph.recalling import recalled_name
from core.graph.workflows.embed_prompt import EMBED_PROMPT
from core.handles import Artefact
from core.ipc.shared_array import carve
from core.messages.engine import EngineRequest
from core.sampling_params import SamplingParams
from core.scheduling.ops.embed import MAX_EMBEDDING
from engine.client.recall.edit_recall import without_steps
from model_executor.worker.loading.resident import ResidentModels
from tools.random_checkpoints import make_qwen, make_sd3, make_z_image
from tools.random_unet_checkpoints import make_sd, make_sdxl

SIDE = 96
STEPS, SKIPPED = 6, 2
MAKE: dict[str, Callable[[Path], Path]] = {
    "sd3": make_sd3,
    "qwen": make_qwen,
    "z-image": make_z_image,
    "sd": partial(make_sd, scheduler_class=EulerDiscreteScheduler),
    "sdxl": make_sdxl,
}
EVERYTHING = np.full((SIDE, SIDE), 255, np.uint8)


@pytest.fixture(scope="module", params=MAKE)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ResidentModels:
    path = MAKE[request.param](tmp_path_factory.mktemp("model") / request.param)
    opened = ResidentModels.open([ModelConfig(model=str(path), served_model_name="m", dtype="float32")])
    opened.load_all()
    return opened


@pytest.mark.parametrize("strength", [1.0, 0.8], ids=["prompt", "picture"])
def test_the_rest_of_a_run_is_as_in_the_whole_run(models: ResidentModels, strength: float) -> None:
    files: Files | None = (file_of(picture(7, (SIDE, SIDE))), file_of(EVERYTHING)) if strength < 1 else None
    sampling = SamplingParams(num_inference_steps=STEPS, seed=3, strength=strength)
    with closing(OneProcess(models)) as engine:
        whole = engine.request("whole", "m", sampling, files, SIDE)
        spec, width = whole.picture, engine.infos["m"].latent_width
        shape = spec.num_tokens, width
        state = carve(engine.alloc(4 * spec.num_tokens * width), 0, shape, "float32")
        (expected,) = engine.run(with_spec(whole, kept_states={SKIPPED: state}))
        rest = with_spec(
            engine.request("rest", "m", sampling, files, SIDE),
            state=state,
            sampling=without_steps(spec.sampling, SKIPPED),
        )
        rounds = (whole.rounds[0] - SKIPPED,)
        (found,) = engine.run(msgspec.structs.replace(rest, workflow=recalled_name(whole.workflow), rounds=rounds))
    assert np.array_equal(found, expected)


def test_a_prompt_has_an_embedding_of_length_one(models: ResidentModels) -> None:
    with closing(OneProcess(models)) as engine:
        place = carve(engine.alloc(4 * MAX_EMBEDDING), 0, (MAX_EMBEDDING,), "float32")
        asked = engine.request("asked", "m", SamplingParams(num_inference_steps=STEPS, seed=3), None, SIDE)
        asked = with_spec(asked, outputs={"embedding": Artefact(place, "value")}, previews=())
        engine.finish(msgspec.structs.replace(asked, workflow=EMBED_PROMPT.name, rounds=()))
        assert np.linalg.norm(engine.view(place)) == pytest.approx(1, abs=1e-5)


def with_spec(request: EngineRequest, **changes: object) -> EngineRequest:
    return msgspec.structs.replace(request, spec=msgspec.structs.replace(request.picture, **changes))
