from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.config import ModelConfig
from core.ipc.shared_array import Arena
from core.model_info import ModelInfo
from model_executor.models.base import Family
from model_executor.models.families import vae_family
from model_executor.worker.loading.resident import ResidentModels
from tools.random_checkpoints import make_flux_fill


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    if "triton" in sys.modules and os.environ["TRITON_INTERPRET"] == "1":
        from quick_interpreter import quicken

        quicken()


@pytest.fixture(scope="session", autouse=True)
def _brief_tables() -> None:
    """A sampler of UNets finds what its scheduler keeps between steps by what that prints. Its tables, of a thousand
    numbers each, never change: printed whole, they take half of the time in which such a model is opened.
    """
    torch.set_printoptions(threshold=200)


@pytest.fixture
def slow_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any CPU, models in float32 compute in float32 alone."""
    monkeypatch.setattr(vae_family, "cpu_gains_by_bfloat16", lambda: False)


@pytest.fixture
def fast_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any CPU, mask-aware edits encode and decode in bfloat16."""
    monkeypatch.setattr(vae_family, "cpu_gains_by_bfloat16", lambda: True)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random FLUX.1 Fill checkpoint with guidance embedding and dynamic shifting, as FLUX.1-Fill-dev has them."""
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    return make_flux_fill(path, guidance_embeds=True, scheduler={"use_dynamic_shifting": True})


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    """An arena with room for the pictures of a test file's edits."""
    arena = Arena.create(1, 1 << 26)
    yield arena
    arena.close()


@pytest.fixture(scope="module")
def models(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResidentModels]:
    """The tiny checkpoint, loaded as in a worker."""
    config = ModelConfig(model=str(tiny_checkpoint), served_model_name="tiny", dtype="float32", device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        models = ResidentModels.open([config])
        models.load_all()
        yield models


@pytest.fixture(scope="module")
def info(models: ResidentModels) -> ModelInfo:
    (info,) = models.ready(0).models
    return info


@pytest.fixture(scope="module")
def family(models: ResidentModels) -> Family:
    return models.families["tiny"]
