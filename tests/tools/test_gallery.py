"""The playground's example files equal what the `gallery` stage draws."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from tools.train_embedded.gallery import FOLDER, write_gallery

ROOT = Path(__file__).resolve().parents[2]


def test_the_examples_of_the_playground_are_the_ones_drawn(tmp_path: Path) -> None:
    write_gallery(tmp_path)
    shipped = ROOT / FOLDER
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in shipped.iterdir()}
    assert json.loads((tmp_path / "examples.json").read_text()) == json.loads((shipped / "examples.json").read_text())
    for path in tmp_path.glob("*.png"):
        drawn, kept = (np.asarray(Image.open(folder / path.name)) for folder in (tmp_path, shipped))
        assert np.array_equal(drawn, kept), path.name
