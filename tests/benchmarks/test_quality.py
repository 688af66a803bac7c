"""How the benchmarks of quality judge edits, and the masks that they draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.baselines.fill_pipeline import FillPipeline
from benchmarks.quality import by_ratio, samplers, step_skipping
from benchmarks.quality.by_ratio import Judged
from benchmarks.quality.edits import Likeness
from benchmarks.quality.frontier_plot import Point, write_plot
from benchmarks.quality.judge import Outcome
from benchmarks.quality.masks import box_anywhere, box_in_the_middle, part_of_box
from benchmarks.quality.sheet import write_sheet
from tools.random_checkpoints import make_flux_fill
from tools.train_embedded import seeds
from tools.train_embedded.cases import Case, cases
from tools.train_embedded.metrics import Scores
from tools.train_embedded.scenes import SIZE


def likeness(in_box: float, colour: float = 0.0) -> Likeness:
    return Likeness(np.array([in_box, 1.0]), np.array([0.999, 0.999]), colour, 0.0)


def outcome(like: Likeness, num_changed_outside: int = 0) -> Outcome:
    accuracy = Scores(0.96, 0.92, 1.0, {}, {}, 2)
    return Outcome(like, likeness(0.5), accuracy, num_changed_outside, 0.25, 3_000_000, [], [])


@pytest.mark.parametrize(
    ("judged", "is_good"),
    [
        (outcome(likeness(0.99)), True),
        (outcome(likeness(0.9)), False),
        (outcome(likeness(0.99, colour=-2.0)), False),
        (outcome(likeness(0.99), num_changed_outside=1), False),
    ],
)
def test_an_outcome_is_shown_with_its_verdict(judged: Outcome, is_good: bool) -> None:
    rows = dict(judged.rows)
    assert judged.figures["within"] is is_good
    assert list(rows.values())[-1] == ("yes" if is_good else "no")
    if is_good:
        assert rows["SSIM in the mask's box, mean / p10"] == "0.9950 / 0.9910 (0.7500 / 0.5500)"
        assert rows["colour, points from 96.0%"] == "+0.0 (+0.0)"
        assert rows["tokens computed, pages of a template"] == "0.250, 3.0 MB"


def test_edits_are_sorted_by_mask_ratio_and_full_steps() -> None:
    judged = {"boxes": [Judged(0.12, (0.9, 1.0)), Judged(0.13, (0.8, 1.0)), Judged(0.7, (0.5, 0.5))]}
    rows, result = by_ratio._table(judged, (0, 1))
    assert [name for name, _ in rows] == ["boxes, 0.10 - 0.15, 2 edits", "boxes, 0.60 - 1.00, 1 edits"]
    assert rows[0][1] == "0: 0.8500 / 0.8100   1: 1.0000 / 1.0000"
    assert result["boxes_0.60_full_1"] == 0.5


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


def test_schedules_are_tried_around_the_calibrated_one() -> None:
    calibrated = (0, 1, 2, 3, 4, 5, 6, 7, 20)
    tried = step_skipping.ladder(calibrated, 28)
    lengths = [len(each) for each in tried]
    assert calibrated in tried
    assert lengths == sorted(set(lengths), reverse=True)
    assert 28 // 4 <= lengths[-1] < len(calibrated) < lengths[0] <= 28 // 2


def test_ways_are_compared_with_the_first_edit_by_edit() -> None:
    asked = cases(seeds.TUNING, 2, "box")
    order = list[str]()

    def way(name: str, change: int) -> step_skipping.Way:
        def edit(case: Case, seed: int) -> step_skipping.Made:
            order.append(f"{name}{seed}")
            return step_skipping.Made(np.clip(case.truth.astype(int) + seed * change, 0, 255).astype(np.uint8), 4, 0.5)

        return step_skipping.Way(name, edit)

    first, other = step_skipping.measure([way("a", 0), way("b", 90)], asked)
    assert order == ["a0", "b0", "a1", "b1"]
    assert (first.ssim_mean, first.seconds, first.steps) == (1.0, 0.5, 4.0)
    assert other.ssim_p10 < other.ssim_mean < 1.0
    assert other.row(1.0)[1].endswith("500 ms, 0.50 of diffusers' time")


def test_a_plot_has_a_curve_for_each_family(tmp_path: Path) -> None:
    curves = {"some way": [Point(0.2, 0.99), Point(0.1, 0.96)], "another": [Point(0.1, 0.5)]}
    texts = list[str]()
    for name in ("a.svg", "b.svg"):
        write_plot(tmp_path / name, "a title", curves)
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1], "the same figures give the same file"
    assert all(f">{words}<" in texts[0] for words in ("a title", "some way", "another"))


def test_samplers_are_compared_with_themselves(tmp_path: Path) -> None:
    pipeline = FillPipeline(str(make_flux_fill(tmp_path / "flux")), "float32", 1)
    edits = samplers.Edits(pipeline, cases(seeds.TUNING, 1, "box"), steps=4)
    for sampler in samplers.SAMPLERS:
        likeness = edits.compare(sampler, [(0, 1, 2, 3), (0, 1)])
        assert likeness["schedule of 4"] == likeness["4 even steps"] == 1.0, sampler.name
        assert likeness["schedule of 2"] < 1.0
        assert likeness.get("other draws", 0.0) < 1.0
        assert ("other draws" in likeness) is sampler.draws
