"""Families whose denoiser sees the template as tokens of its own, in an engine: over pages, and beside pictures of
nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from edits import box_mask, picture
from hires_rig import file_of
from one_process import OneProcess

from benchmarks.gpu.local_engine import LocalEngine
from core.config import CacheConfig, ModelConfig
from core.sampling_params import SamplingParams
from model_executor.worker.loading.resident import ResidentModels
from tools.random_checkpoints import make_flux_kontext, make_qwen_edit_plus

SIDE = 96
CACHE = CacheConfig(host_bytes=2**28)
MAKE: dict[str, Callable[[Path], Path]] = {
    "flux-kontext": partial(make_flux_kontext, guidance_embeds=True),
    "qwen-image-edit-2511": partial(make_qwen_edit_plus, zero_cond_t=True),
}
SAMPLING = SamplingParams(num_inference_steps=4, seed=3, negative_prompt="blue", true_cfg_scale=3.0)


@pytest.fixture(scope="module", params=MAKE)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKE[request.param](tmp_path_factory.mktemp("model") / request.param)


def test_edits_over_pages_are_the_same_in_company(checkpoint: Path) -> None:
    """Guided, of two sizes. They differ a little from exact ones: pages are read."""
    templates = [picture(1, (SIDE, SIDE)), picture(2, (64, SIDE))]
    with closing(LocalEngine(checkpoint, "cpu", "float32", CACHE)) as engine:
        together = engine.edit(templates, SAMPLING)
        alone = [engine.edit([template], SAMPLING)[0] for template in templates]
        exact = engine.edit(templates[:1], msgspec.structs.replace(SAMPLING, mask_aware=False))[0]
    assert all(map(np.array_equal, together, alone))
    difference = np.abs(alone[0][32:64, 32:64].astype(int) - exact[32:64, 32:64])
    assert 0 < difference.mean() < 3


def test_edits_and_pictures_of_nothing_share_steps(checkpoint: Path) -> None:
    """Each has the tokens that are predicted for it, and the bytes that it has alone."""
    files = file_of(picture(7, (SIDE, SIDE))), file_of(box_mask((SIDE, SIDE)) * 255)
    models = ResidentModels.open([ModelConfig(model=str(checkpoint), served_model_name="m", dtype="float32")])
    models.load_all()
    with closing(OneProcess(models)) as engine:
        requests = [engine.request(f"{n}", "m", SAMPLING, each, SIDE) for n, each in enumerate((files, None, files))]
        together = engine.run(*requests[:2])
        alone = [engine.run(request)[0] for request in (requests[2], engine.request("3", "m", SAMPLING, None, SIDE))]
    tokens = (SIDE // 16) ** 2
    seen = [tokens, tokens if models.families["m"].text_sees_template else 0]
    assert [request.spec.num_condition_tokens for request in requests[:2]] == seen
    assert all(map(np.array_equal, together, alone))
    assert (together[0] != together[1]).mean() > 0.5
