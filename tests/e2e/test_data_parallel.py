"""Two engines behind one router paint the same pictures, and edits find warm templates. Each test uses its own
pictures.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
from engines import serving_engine
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from core.config import EngineConfig, ModelConfig, RouterPolicy, StencilConfig
from core.sampling_params import SamplingParams
from engine.client.async_engine import AsyncEngine
from engine.client.edit_types import EditInput, EditReport
from engine.client.upload import BytesUpload
from tools.random_checkpoints import make_flux_fill

Pixels = npt.NDArray[np.uint8]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flux_fill(tmp_path_factory.mktemp("model") / "flux", generation_config={"num_inference_steps": 4})


@asynccontextmanager
async def start(checkpoint: Path, policy: RouterPolicy = "mask-aware") -> AsyncIterator[AsyncEngine]:
    model = ModelConfig(model=str(checkpoint), threads=1)
    config = EngineConfig(models=(model,), data_parallel_size=2)
    async with serving_engine(StencilConfig(engine=config, router_policy=policy)) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    async with start(checkpoint) as engine:
        yield engine


def file_of(pixels: Pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def make_input(seed: int = 0, steps: int = 4, **sampling: object) -> EditInput:
    """An edit of the middle of a random picture of 96 x 96 pixels, determined by `seed`."""
    pixels = np.random.default_rng(seed).integers(0, 256, (96, 96, 3), np.uint8)
    mask = np.zeros((96, 96), np.uint8)
    mask[32:64, 32:64] = 255
    params = SamplingParams(num_inference_steps=steps, seed=7, **sampling)  # type: ignore[arg-type]
    image, mask_image = BytesUpload(file_of(pixels)), BytesUpload(file_of(mask))
    return EditInput(prompt="a red shirt", image=image, mask=mask_image, mask_kind="luminance", sampling=params)


async def run(engine: AsyncEngine, request_id: str, edit: EditInput) -> tuple[bytes, EditReport]:
    async with engine.edit(request_id, edit, engine.choose_model()) as outputs:
        output = await anext(outputs)
        assert output.report is not None
        return bytes(output.data), output.report


def metric(engine: AsyncEngine, name: str) -> dict[str, float]:
    """The metric's value since the start, by engine; "" for metrics without an engine label."""
    families = text_string_to_metric_families(engine.metrics.exposition().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == f"stencil:{name}"]
    return {sample.labels.get("engine", ""): sample.value for sample in samples}


def routed(engine: AsyncEngine, before: dict[str, float] | None = None) -> list[float]:
    """Images sent to each engine since `before`, by default since the start."""
    return [n - (before or {}).get(name, 0) for name, n in sorted(metric(engine, "router_requests_total").items())]


async def test_engines_take_turns_and_paint_the_same(checkpoint: Path) -> None:
    async with start(checkpoint, "round-robin") as engine:
        results = [await run(engine, f"r{i}", make_input()) for i in range(4)]
        assert routed(engine) == [2, 2]
        assert len({data for data, _ in results}) == 1
        assert [report.cache for _, report in results] == ["miss", "miss", "hit", "hit"], "each has its own pages"


async def test_an_edit_goes_where_its_template_is_warm(two: AsyncEngine) -> None:
    edits, before = [make_input(seed) for seed in range(4)], metric(two, "router_requests_total")
    for round_number in range(3):
        for number, edit in enumerate(edits):
            _, report = await run(two, f"r{round_number}-{number}", edit)
            assert report.cache == ("hit" if round_number else "miss")
    assert min(routed(two, before)) >= 3, "cold templates were spread"


async def test_a_burst_is_spread(two: AsyncEngine) -> None:
    before, predicted = metric(two, "router_requests_total"), metric(two, "router_prediction_error_ratio_count")[""]
    await asyncio.gather(*(run(two, f"burst-{i}", make_input(seed=10 + i, steps=12)) for i in range(8)))
    assert min(routed(two, before)) >= 3
    assert metric(two, "router_prediction_error_ratio_count")[""] == predicted + 8


async def test_a_template_is_registered_once_found_and_dropped_everywhere(two: AsyncEngine) -> None:
    edit = make_input(seed=20)
    image = edit.image
    assert image is not None
    template = await two.prime_template("prime", image)
    assert template.primed
    _, report = await run(two, "edit", replace(edit, image=None, template_id=template.id))
    assert report.cache == "hit"
    two.delete_template(template.id, "")
    _, report = await run(two, "again", edit)
    assert report.cache == "miss"


async def test_aborts_reach_the_engine_that_has_the_request(two: AsyncEngine) -> None:
    async with asyncio.timeout(20):
        tasks = [asyncio.create_task(run(two, f"aborted-{i}", make_input(seed=30 + i, steps=200))) for i in range(4)]
        while two.num_requests_running < 4:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        while two.services.arena.used_bytes:
            await asyncio.sleep(0.01)
    assert [load.num_running for load in two.loads if load] == [0, 0]
