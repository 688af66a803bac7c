"""What benchmark_serving draws has the distributions that it names, and is the same for the same seed."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.load import draws
from benchmarks.load.arrivals import due_times
from benchmarks.load.dataset import Mix, TraceLine, from_folder, from_trace, read_trace, synthetic
from benchmarks.load.pictures import alpha_mask, box, encode, template

MANY = 20_000


def random() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    ("name", "mean"), [("flashps-prod", 0.11), ("public", 0.19), ("viton", 0.35), ("fixed:0.3", 0.3)]
)
def test_mask_areas_have_the_papers_means(name: str, mean: float) -> None:
    areas = draws.mask_areas(name)(random(), MANY)
    assert areas.mean() == pytest.approx(mean, abs=0.01)
    assert areas.min() > 0
    assert areas.max() <= 1


def test_template_reuse() -> None:
    zipf = draws.templates("zipf:1.0", 10)(random(), MANY)
    counts = np.bincount(zipf, minlength=10)
    assert counts[0] / counts[4] == pytest.approx(5, rel=0.1)
    assert len(set(draws.templates("unique", 10)(random(), 100).tolist())) == 100
    assert draws.templates("fixed:3", 10)(random(), 5).tolist() == [0, 1, 2, 0, 1]


def test_step_counts() -> None:
    assert set(draws.step_counts("12")(random(), 9).tolist()) == {12}
    uniform = draws.step_counts("uniform:30-50")(random(), MANY)
    assert (uniform.min(), uniform.max()) == (30, 50)
    assert uniform.mean() == pytest.approx(40, abs=0.2)
    assert set(draws.step_counts("choice:8,28")(random(), 99).tolist()) == {8, 28}


@pytest.mark.parametrize("bad", ["fixed:0", "fixed:2", "gauss", "fixed:x"])
def test_a_mask_ratio_dist_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"mask-ratio-dist|could not convert"):
        draws.mask_areas(bad)


@pytest.mark.parametrize(("burstiness", "cv"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_arrivals_have_the_rate_and_spread_asked_for(burstiness: float, cv: float) -> None:
    between = np.diff([0.0, *due_times("poisson", MANY, 5.0, burstiness, random())])
    assert between.mean() == pytest.approx(0.2, rel=0.05)
    assert between.std() / between.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize(
    ("arrivals", "rate", "burstiness"),
    [
        *[("gauss", 1.0, 1.0), ("poisson", 0.0, 1.0), ("poisson", 1.0, 0.0)],
        *[("windows:1/1", 1.0, 1.0), ("windows:1/0/5", 1.0, 1.0), ("windows:1/1/inf", 1.0, 1.0)],
    ],
)
def test_arrivals_that_cannot_be_drawn_are_refused(arrivals: str, rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="arrivals"):
        due_times(arrivals, 3, rate, burstiness, random())


def test_each_window_of_arrivals_has_its_own_rate_and_spread() -> None:
    due = np.array(due_times("windows:2/1/1000,20/4/1000", MANY, 1.0, 1.0, random()))
    assert (np.diff(due) >= 0).all()
    inside, busy = due % 2000, due % 2000 >= 1000
    first = np.diff(due[~busy])[np.diff(inside[~busy]) > 0]
    assert first.mean() == pytest.approx(1 / 2, rel=0.05)
    assert first.std() / first.mean() == pytest.approx(1, rel=0.05)
    second = np.diff(due[busy])[np.diff(inside[busy]) > 0]
    assert second.mean() == pytest.approx(1 / 20, rel=0.2)
    assert second.std() / second.mean() == pytest.approx(4, rel=0.1)


def test_arrivals_at_once_and_from_a_trace(tmp_path: Path) -> None:
    assert due_times("poisson", 3, float("inf"), 1.0, random()) == [0.0, 0.0, 0.0]
    trace = tmp_path / "arrivals.txt"
    trace.write_text("10.5\n10.0\n12.0\n")
    assert due_times(f"trace:{trace}", 2, 1.0, 1.0, random()) == [0.0, 0.5]
    with pytest.raises(ValueError, match="3 arrivals"):
        due_times(f"trace:{trace}", 4, 1.0, 1.0, random())


@pytest.mark.parametrize("area", [0.0002, 0.05, 0.35, 0.7, 0.95, 1.0])
def test_a_box_has_its_area_and_lies_within(area: float) -> None:
    size, dice = (256, 192), random()
    for _ in range(50):
        left, top, right, bottom = box(area, size, dice)
        assert 0 <= left < right <= size[0]
        assert 0 <= top < bottom <= size[1]
        assert (right - left) * (bottom - top) / (256 * 192) == pytest.approx(area, abs=0.01)


def test_templates_differ_and_masks_are_transparent_where_they_edit() -> None:
    contents = {encode(template(number, (32, 24))) for number in range(50)}
    assert len(contents) == 50
    mask = alpha_mask((2, 3, 6, 9), (32, 24))
    assert (mask[..., 3] == 0).sum() == 4 * 6
    assert mask[3, 2, 3] == 0


def test_synthetic_edits_are_what_the_mix_says() -> None:
    mix = Mix("fixed:0.25", "fixed:2", num_inference_steps="choice:8,28", sizes="64x32")
    calls, again = (synthetic(mix, 6, random()) for _ in range(2))
    assert calls == again
    assert len({call.image for call in calls}) == 2
    with Image.open(io.BytesIO(calls[0].mask or b"")) as mask:
        assert mask.size == (64, 32)
        assert (np.asarray(mask.getchannel("A")) == 0).mean() == pytest.approx(0.25, abs=0.03)


def test_a_trace_line_goes_before_the_draw(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"mask_ratio": 0.5, "num_inference_steps": 3, "template": 7, "size": "40x40", "slo_ms": 9}\n{}\n')
    lines = read_trace(path, 2)
    assert lines[1] == TraceLine()
    first, second = from_trace(Mix(sizes="64x64"), lines, random())
    assert (first.area, first.steps, first.slo_ms) == (0.5, 3, 9)
    assert first.image == encode(template(7, (40, 40)))
    assert second.steps == 8
    with pytest.raises(ValueError, match="2 edits"):
        read_trace(path, 3)


def test_a_folders_own_masks_and_prompts_are_used(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encode(template(0, (32, 32))))
    (tmp_path / "a_mask.png").write_bytes(encode(alpha_mask((0, 0, 8, 8), (32, 32))))
    (tmp_path / "a.txt").write_text("a green hat\n")
    (tmp_path / "b.png").write_bytes(encode(template(1, (32, 32))))
    first, second = from_folder(Mix("fixed:0.5", "fixed:2"), tmp_path, 2, random())
    assert (first.prompt, first.area) == ("a green hat", None)
    assert first.mask == (tmp_path / "a_mask.png").read_bytes()
    assert second.area == 0.5
