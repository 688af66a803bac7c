"""What the benchmarks of quality print, and how their settings and masks are chosen."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.quality import knobs
from benchmarks.quality.edits import Likeness, Setting
from benchmarks.quality.knobs import CHEAPEST, DEAREST, Outcome, settings_around
from benchmarks.quality.masks import box_anywhere, box_in_the_middle, part_of_box
from benchmarks.quality.sheet import write_sheet
from tools.train_embedded import seeds
from tools.train_embedded.cases import cases
from tools.train_embedded.scenes import SIZE

DEFAULT = Setting("3", "int8", 8, 0)


def likeness(in_box: float, colour: float = 0.0) -> Likeness:
    return Likeness(np.array([in_box, 1.0]), np.array([0.999, 0.999]), colour, 0.0)


def outcome(like: Likeness, num_changed_outside: int = 0) -> Outcome:
    return Outcome(8, 0, like, likeness(0.5), 0.96, 0.92, num_changed_outside, [], [])


@pytest.mark.parametrize(
    ("judged", "verdict"),
    [
        (outcome(likeness(0.99)), "yes"),
        (outcome(likeness(0.9)), "no"),
        (outcome(likeness(0.99, colour=-2.0)), "no"),
        (outcome(likeness(0.99), num_changed_outside=1), "no"),
    ],
)
def test_an_outcome_is_printed_with_its_verdict(judged: Outcome, verdict: str) -> None:
    text = knobs._outcome_markdown(judged)
    assert text.startswith("8 steps, 0 in full, mask-aware against exact")
    assert f"nothing changed outside): {verdict}" in text
    if verdict == "yes":
        assert "| SSIM in the mask's box, mean / p10 | 0.9950 / 0.9910 | 0.7500 / 0.5500 |" in text
        assert "| colour accuracy, points from exact's 96.0% | +0.0 | +0.0 |" in text


def test_the_default_is_bold_in_the_table() -> None:
    times = {"active_ratio": 0.25, "denoise_ratio": 0.5, "edit_ratio": 0.65, "page_bytes": 3_000_000}
    rows = [
        asdict(setting) | {"steps": 8} | likeness(0.99).figures | times
        for setting in (DEFAULT, replace(DEFAULT, full_steps=None))
    ]
    text = knobs._part("Table", rows=[knobs._cells(row, DEFAULT) for row in rows], num_edits=2)
    bold, plain = text.splitlines()[-2:]
    assert bold.startswith("| **8** | **3** | **int8** | **8** | **0** | **0.250** | **0.9950 / 0.9910 / 0.990** |")
    assert plain == (
        "| 8 | 3 | int8 | 8 | by ratio | 0.250 | 0.9950 / 0.9910 / 0.990 | 0.9990 | +0.0, +0.0 | 0.50x | 0.65x | 3.0 |"
    )


def test_settings_move_one_knob_and_share_engines() -> None:
    settings = settings_around(DEFAULT)
    assert len(settings) == len(set(settings))
    assert settings[0] == DEFAULT
    for setting in settings:
        moved = [name for name, value in asdict(setting).items() if value != getattr(DEFAULT, name)]
        assert len(moved) <= 1 or setting in (CHEAPEST, DEAREST)
    of_default = [key for key, _ in groupby(settings, key=lambda setting: setting.server) if key == DEFAULT.server]
    assert of_default == [DEFAULT.server], "one engine serves all settings that it can"


def test_boxes_lie_in_the_picture() -> None:
    for seed, case in enumerate(cases(seeds.TUNING, 3, "box")):
        part = part_of_box(case, seed).mask
        assert part.any()
        assert not (part & ~case.mask).any()
        for box in (box_anywhere(case, seed).mask, box_in_the_middle(case, seed).mask):
            rows, columns = np.flatnonzero(box.any(1)), np.flatnonzero(box.any(0))
            assert box.sum() == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)


def test_a_sheet_has_a_row_for_each_edit(tmp_path: Path) -> None:
    picture = np.full((SIZE, SIZE, 3), 7, np.uint8)
    write_sheet(tmp_path / "sheet.png", [([picture] * 3, "a red shirt")] * 2, ["a", "b", "c"])
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (3 * (SIZE + 6) + 6, 20 + 2 * (SIZE + 26) + 6)
        assert sheet.getpixel((10, 30)) == (7, 7, 7)
