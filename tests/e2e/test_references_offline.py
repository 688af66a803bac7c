"""References from Python: mask-aware edits over pages with them, the same on two ranks and in company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pictures import Pixels, photo

from core.errors import InvalidRequestError
from entrypoints import Edit, ImageEngine, SamplingParams
from tools.random_checkpoints import make_klein

SIZES = ((64, 80), (80, 64))


def edits() -> list[Edit]:
    """With no, one and two references."""
    mask = np.zeros((80, 96), np.uint8)
    mask[16:48, 32:64] = 255
    shown = [photo(*size, seed=7) for size in SIZES]
    return [Edit(prompt="a hat", image=photo(), mask_image=mask, references=shown[:number]) for number in range(3)]


def run(engine: ImageEngine, wanted: list[Edit], **options: bool | int) -> list[Pixels]:
    sampling = SamplingParams(num_inference_steps=3, seed=3, **options)  # type: ignore[arg-type]
    results = engine.generate(wanted, sampling, use_tqdm=False)
    assert [result.error for result in results] == [None] * len(wanted)
    is_aware = options["mask_aware"]
    assert all((result.reports[0].exact_reason is None) == is_aware for result in results)
    return [np.asarray(result.images[0]) for result in results]


def test_pages_hold_the_references(tmp_path: Path) -> None:
    checkpoint = str(make_klein(tmp_path / "klein"))
    made: dict[int, list[Pixels]] = {}
    for workers in (1, 2):
        with ImageEngine(checkpoint, dtype="float32", mask_aware=True, workers_per_engine=workers) as engine:
            exact = run(engine, edits(), mask_aware=False)
            together = run(engine, edits(), mask_aware=True, full_steps=0)
            again = [run(engine, [edit], mask_aware=True, full_steps=0)[0] for edit in edits()]
            full = run(engine, edits(), mask_aware=True, full_steps=1)
        np.testing.assert_array_equal(together, again)
        assert np.abs(np.subtract(exact, together, dtype=np.int16)).mean() < 1
        made[workers] = [*exact, *together, *full]
        assert len({picture.tobytes() for picture in together}) == 3
    np.testing.assert_array_equal(made[1], made[2])


def test_what_is_no_list_of_pictures_is_refused() -> None:
    for wrong in ("a.png", [3], {"a": 1}):
        with pytest.raises(InvalidRequestError, match="references"):
            Edit(prompt="a hat", image=photo(), references=wrong)  # type: ignore[arg-type]
