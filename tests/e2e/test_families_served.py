"""Workflows of the families' models, offline: they make the pictures of the shipped workflow, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from edits import box_mask, picture
from PIL import Image

from core.config import ModelConfig
from core.sampling_params import SamplingParams
from engine.client.edit_types import EditReport
from entrypoints import Edit, ImageEngine
from tools.random_checkpoints import make_flux

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "workflows"
SIZE = (128, 96)
PICTURE, MASK = Image.fromarray(picture(1, SIZE)), Image.fromarray(box_mask(SIZE) * 255)
PARAMS = SamplingParams(num_inference_steps=4, seed=5, mask_aware=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flux(tmp_path_factory.mktemp("models") / "flux", native_size=128)


@pytest.fixture(scope="module", params=[1, 2])
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[ImageEngine]:
    models = [
        ModelConfig(model=str(checkpoint), served_model_name=name or "plain", workflow=name, dtype="float32", threads=1)
        for name in ("", "figure7", "guarded")
    ]
    files = [EXAMPLES / "figure7.py", EXAMPLES / "guarded.py"]
    with ImageEngine(models=models, workflows=files, image_workers=1, workers_per_engine=request.param) as engine:
        yield engine


def made(engine: ImageEngine, **edit: Any) -> tuple[npt.NDArray[np.uint8], EditReport]:
    (result,) = engine.generate([Edit(prompt="a red hat", **edit)], PARAMS, use_tqdm=False)
    if result.error:
        raise result.error
    return np.asarray(result.images[0]), result.reports[0]


@pytest.mark.parametrize("given", [{"size": SIZE}, {"image": PICTURE, "mask_image": MASK}], ids=["generation", "edit"])
def test_they_make_the_pictures_of_the_shipped_workflow(engine: ImageEngine, given: dict[str, Any]) -> None:
    plain, report = made(engine, model="plain", **given)
    figure, other = made(engine, model="figure7", **given)
    np.testing.assert_array_equal(figure, plain)
    assert other.exact_reason == report.exact_reason
    for most_red, is_safe in ((255.0, True), (-255.0, False)):
        guarded, report = made(engine, model="guarded", inputs={"most_red": most_red}, **given)
        assert report.values == {"is_safe": is_safe}
        if is_safe:
            np.testing.assert_array_equal(guarded, plain)
        elif "size" in given:
            assert not guarded.any()
        else:
            assert (guarded != plain).any()
