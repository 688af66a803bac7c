"""A small random checkpoint, and what serves it: a server, an offline engine, diffusers' pipeline. Tests share them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import on_ray
import pytest
from diffusers import FluxFillPipeline
from server_process import ServerProcess, fork

from entrypoints import ImageEngine
from tools.random_checkpoints import make_flux_fill

API_KEY = "sk-local"
NUM_STEPS = 4  # the checkpoint's default


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--on-ray"):
        items[:] = [item for item in items if item.get_closest_marker("one_machine") is None]


@pytest.fixture(scope="session", autouse=True)
def _launcher(launcher: str) -> None:
    """It forks the workers of all engines, and what forks servers."""


@pytest.fixture(scope="module", autouse=True)
def _engines(forked_engines: None) -> None:
    """Those of this process are forked, too."""


@pytest.fixture(scope="session", autouse=True)
def _machines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _cache_folder: None
) -> Iterator[None]:
    """Where engines are, if they are not here."""
    with on_ray.placed_there(tmp_path_factory.mktemp("r")) if request.config.getoption("--on-ray") else nullcontext():
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_shims() -> Iterator[None]:
    """Faults on machines end with the module that has injected them."""
    yield
    on_ray.inject(None)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "flux"
    return make_flux_fill(path, generation_config={"num_inference_steps": NUM_STEPS})


@pytest.fixture(scope="session")
def server_flags(tiny_checkpoint: Path) -> tuple[str, ...]:
    return ("--model", str(tiny_checkpoint), "--served-model-name", "tiny/fill", "--threads", "1", "--dtype", "float32")


@pytest.fixture(scope="session")
def server(server_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A ready server with an API key and small limits. At the end it must exit cleanly with all its children."""
    flags = ("--api-key", API_KEY, "--max-queue", "16", "--max-upload-bytes", "4000000", "--max-pixels", "4000000")
    server = fork(tmp_path_factory.mktemp("server") / "scratch", *server_flags, *flags)
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture(scope="module")
def image_engine(tiny_checkpoint: Path) -> Iterator[ImageEngine]:
    with ImageEngine(str(tiny_checkpoint), dtype="float32", threads=1) as engine:
        yield engine


@pytest.fixture(scope="session")
def pipeline(tiny_checkpoint: Path) -> FluxFillPipeline:
    pipeline = FluxFillPipeline.from_pretrained(tiny_checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
