"""Calibration: the search's choices, the edits that it compares, and error messages of the command."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cache_kit import SCHEME
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image

from core.errors import ConfigError
from core.model_info import ModelInfo
from core.sampling_params import SamplingParams
from entrypoints import calibrate
from entrypoints.calibrate import main
from entrypoints.calibration.samples import find_images, make_samples, random_box
from entrypoints.calibration.search import (
    CHEAPEST,
    DEAREST,
    DTYPES,
    FULL_STEPS,
    KEYFRAMES,
    MARGINS,
    CacheSearch,
    ClassTrial,
    Setting,
    StepSearch,
    Trial,
    by_size,
    describe_full_steps,
    schedules,
    search_steps,
)
from entrypoints.calibration.trials import Trials
from entrypoints.image_engine import Edit, EditResult
from entrypoints.pictures import encode_picture

STEPS = 8
MODEL = ModelInfo(
    name="m",
    family="flux-fill",
    native_size=64,
    token_size=16,
    latent_width=64,
    max_text_tokens=8,
    default_num_inference_steps=STEPS,
    default_guidance_scale=1.0,
    has_guidance=False,
    has_true_cfg=False,
    device="cpu",
    dtype="float32",
)

Likeness = Callable[[Setting], float]
LikenessBySize = Callable[[Setting, int], float]
"""(setting, mask class) -> SSIM p10; class 0 has the smallest masks."""
RATIOS = (0.1, 0.3, 0.5)
"""Of three mask classes, at margin 0."""


def levels(setting: Setting) -> tuple[int, int, int, int]:
    """The index of each parameter's value: keyframes, dtype, margin, full steps."""
    return (
        KEYFRAMES.index(setting.keyframes),
        DTYPES.index(setting.dtype),
        MARGINS.index(setting.margin),
        FULL_STEPS.index(setting.full_steps),
    )


def raised() -> list[Setting]:
    """The settings that are tried after the cheapest one if it fails."""
    trial = Checkpoint(lambda setting: 0.5).measure(CHEAPEST)
    return list(CacheSearch(lambda setting: trial, STEPS, 0.96).raised(trial))


class Checkpoint:
    """A simulated checkpoint whose SSIM p10 is a function of the setting; records the settings that were tried."""

    def __init__(self, p10: Likeness, num_edits: int = 10) -> None:
        self.p10, self.num_edits = p10, num_edits
        self.tried: list[Setting] = []

    def measure(self, setting: Setting) -> Trial:
        self.tried.append(setting)
        ssim = (self.p10(setting),) * self.num_edits
        return Trial(setting, (ClassTrial(ssim, (0.1 + setting.margin / 100,) * 10),))

    def search(self, target: float = 0.96) -> Trial:
        return CacheSearch(self.measure, STEPS, target).run()


class Sized(Checkpoint):
    """As Checkpoint, but the SSIM p10 also depends on the mask's size: three classes of two edits."""

    def __init__(self, p10: LikenessBySize) -> None:
        super().__init__(lambda setting: 0.0)
        self.by_class = p10

    def measure(self, setting: Setting) -> Trial:
        self.tried.append(setting)
        return Trial(setting, tuple(self._class(setting, number) for number in range(len(RATIOS))))

    def _class(self, setting: Setting, number: int) -> ClassTrial:
        ratio = RATIOS[number] + setting.margin / 100
        return ClassTrial((self.by_class(setting, number),) * 2, (ratio - 0.05, ratio + 0.05))


def test_the_cheapest_setting_is_taken_if_it_is_close_enough() -> None:
    checkpoint = Checkpoint(lambda setting: 0.97)
    assert checkpoint.search().setting == CHEAPEST
    assert checkpoint.tried == [CHEAPEST]


def test_a_checkpoint_is_unsafe_if_the_cheapest_and_dearest_settings_fail() -> None:
    checkpoint = Checkpoint(lambda setting: 0.9 if setting == DEAREST else 0.5)
    found = checkpoint.search()
    assert (found.setting, found.reaches(0.96)) == (DEAREST, False)
    assert checkpoint.tried == [CHEAPEST, DEAREST]


@pytest.mark.parametrize("knob", range(4))
def test_the_knob_that_helps_is_raised_and_no_other(knob: int) -> None:
    checkpoint = Checkpoint(lambda setting: 0.9 + 0.04 * levels(setting)[knob])
    found = checkpoint.search()
    assert found.reaches(0.96)
    assert levels(found.setting) == tuple(2 if i == knob else 0 for i in range(4))


def test_of_those_that_reach_the_target_the_cheapest_is_taken() -> None:
    """Every parameter would do: the page dtype costs only memory, and less than a full step or another keyframe."""
    found = Checkpoint(lambda setting: 0.9 if setting == CHEAPEST else 0.97).search()
    costs = {s: Checkpoint(lambda setting: 0.97).measure(s).cost(STEPS) for s in raised()}
    assert found.setting == min(costs, key=lambda setting: costs[setting])


@given(st.lists(st.floats(0, 0.05), min_size=4, max_size=4), st.floats(0.5, 0.99))
def test_the_search_ends_below_the_target_only_if_the_dearest_setting_does(gains: list[float], target: float) -> None:
    def p10(setting: Setting) -> float:
        return 0.7 + sum(gain * level for gain, level in zip(gains, levels(setting), strict=True))

    assert Checkpoint(p10).search(target).reaches(target) == (p10(DEAREST) >= target)


def test_settings_that_ran_no_edit_mask_aware_do_not_count() -> None:
    """A margin of 8 px covers these pictures: such a setting proves nothing."""

    class Small(Checkpoint):
        def measure(self, setting: Setting) -> Trial:
            self.num_edits = 0 if setting.margin >= 8 else 5
            return super().measure(setting)

    found = Small(lambda setting: 0.9 + 0.04 * levels(setting)[3]).search()
    assert found.setting.margin < 8
    assert found.reaches(0.96)


def test_unsafe_is_found_soon_even_if_large_margins_cover_the_picture() -> None:
    class Small(Checkpoint):
        def measure(self, setting: Setting) -> Trial:
            self.num_edits = 0 if setting.margin >= 8 else 5
            return super().measure(setting)

    checkpoint = Small(lambda setting: 0.5)
    found = checkpoint.search()
    assert not found.reaches(0.96)
    assert found.setting == replace(DEAREST, margin=4)
    assert len(checkpoint.tried) == 1 + 4  # the cheapest, and margins of 32, 16, 8 and 4 px


def test_costs_rise_with_every_knob() -> None:
    cheapest = Checkpoint(lambda setting: 1.0).measure(CHEAPEST)
    for setting in raised():
        assert Checkpoint(lambda setting: 1.0).measure(setting).cost(STEPS) > cheapest.cost(STEPS)
    exact_like = Trial(DEAREST, (ClassTrial((1.0,), (1.0,)),))
    assert exact_like.cost(STEPS) == 1 + 1 + 1  # primed at every step, all tokens of every step, all bytes


# ------------------------------------------------------------------------------------------------ small and large masks


def test_large_masks_alone_get_the_full_steps_they_need() -> None:
    needs = (0, 0, 1)  # full steps, of small, middling and large masks
    checkpoint = Sized(lambda setting, size: 0.97 if setting.full_steps_of(size) >= needs[size] else 0.9)
    found = checkpoint.search()
    assert found.setting == replace(CHEAPEST, full_steps=1, full_from=2)
    assert found.full_steps_from == pytest.approx(0.4)  # between masks of at most 0.35 and those of 0.45
    assert describe_full_steps(1, found.full_steps_from) == "full_steps 1 from mask ratio 0.40 on"


def test_larger_masks_have_no_fewer_than_smaller_ones() -> None:
    """Only the middle class fails; a full step costs the large class less."""
    needs = (0, 1, 0)
    found = Sized(lambda setting, size: 0.97 if setting.full_steps_of(size) >= needs[size] else 0.9).search()
    assert found.setting == replace(CHEAPEST, full_steps=1, full_from=1)


def test_all_masks_get_full_steps_if_small_ones_need_them() -> None:
    found = Sized(lambda setting, size: 0.97 if setting.full_steps_of(size) >= 1 else 0.9).search()
    assert found.setting == replace(CHEAPEST, full_steps=1)
    assert found.full_steps_from == 0.0
    assert describe_full_steps(1, 0.0) == "full_steps 1"


def test_full_steps_are_raised_if_one_is_too_few() -> None:
    found = Sized(
        lambda setting, size: 0.9 + 0.02 * FULL_STEPS.index(setting.full_steps_of(size)) if size == 2 else 0.97
    ).search(0.955)
    assert found.setting == replace(CHEAPEST, full_steps=4, full_from=2)


def test_all_classes_with_full_steps_have_equally_many() -> None:
    needs = (0, 1, 2)
    found = Sized(lambda setting, size: 0.97 if setting.full_steps_of(size) >= needs[size] else 0.9).search()
    assert found.setting == replace(CHEAPEST, full_steps=2, full_from=1)


def test_many_good_small_masks_do_not_hide_bad_large_ones() -> None:
    """The p10 over all edits together is above the target."""

    class Mostly(Sized):
        def _class(self, setting: Setting, number: int) -> ClassTrial:
            return replace(super()._class(setting, number), ssim=(0.9,) if number == 2 else (0.99,) * 20)

    trial = Mostly(lambda setting, size: 0.0).measure(CHEAPEST)
    assert np.percentile([ssim for each in trial.classes for ssim in each.ssim], 10) == 0.99
    assert not trial.reaches(0.96)
    assert trial.ssim_p10 == 0.9


def test_a_knob_that_helps_every_size_is_preferred_to_full_steps_for_all() -> None:
    """A margin costs less than a full step of small masks."""
    checkpoint = Sized(lambda setting, size: 0.9 + 0.07 * bool(setting.margin or setting.full_steps_of(size)))
    found = checkpoint.search()
    assert (found.setting.margin, found.setting.full_steps) == (4, 0)


def test_a_step_is_left_for_the_cached_pages() -> None:
    checkpoint = Checkpoint(lambda setting: 0.5 + 0.1 * levels(setting)[3])
    search = CacheSearch(checkpoint.measure, 2, 0.96)
    assert not search.run().reaches(0.96)
    assert {setting.full_steps for setting in checkpoint.tried} == {0, 1}


def test_a_class_whose_edits_all_ran_exact_is_close_enough() -> None:
    covered = ClassTrial((), (1.0, 1.0))
    assert covered.p10 == 1.0
    assert Trial(CHEAPEST, (ClassTrial((0.97,), (0.2,)), covered)).reaches(0.96)
    assert not Trial(CHEAPEST, (covered, covered)).reaches(0.0)  # nothing is known


def test_costs_count_full_steps_where_they_are_run() -> None:
    checkpoint = Sized(lambda setting, size: 1.0)
    none, large, every = (
        checkpoint.measure(replace(CHEAPEST, full_steps=count, full_from=first)).cost(STEPS)
        for count, first in ((0, 0), (1, 2), (1, 0))
    )
    assert large - none == pytest.approx((1 - 0.5) / 3 / STEPS)
    assert every - none == pytest.approx((1 - 0.3) / STEPS)


# ------------------------------------------------------------------------------------------------- step schedules


FOUND = replace(CHEAPEST, keyframes=3, margin=8, full_steps=2, full_from=2)


def search_some(checkpoint: Checkpoint, found: Setting = FOUND) -> Trial:
    return StepSearch(checkpoint.measure, 28, 0.96, found).run()


@given(st.integers(1, 200))
def test_schedules_begin_small_and_grow_from_sparse_to_dense(num_steps: int) -> None:
    found = schedules(num_steps)
    for computed in found:
        gaps = np.diff((*computed, num_steps))
        assert computed[0] == 0
        assert len(computed) < num_steps
        assert (np.diff(gaps[:-1]) >= 0).all(), "no step is smaller than an earlier one, but for the last"
    assert [len(computed) for computed in found] == sorted(len(computed) for computed in found)


def test_the_sparsest_schedule_that_is_close_enough_is_taken_and_nothing_else_changes() -> None:
    found = search_some(Checkpoint(lambda setting: 0.97 if setting.num_computed(28) >= 8 else 0.9))
    assert found.setting == replace(FOUND, full_steps=0, computed=found.setting.computed)
    assert found.setting.num_computed(28) == 8


def test_the_schedule_suits_small_masks_and_large_ones_get_full_steps_among_its_steps() -> None:
    def p10(setting: Setting, size: int) -> float:
        missing = max(0, 2 - setting.full_steps_of(size)) if size == 2 else 0
        return 0.9 + 0.01 * setting.num_computed(28) - 0.02 * missing

    found = search_some(Sized(p10))
    assert (found.setting.num_computed(28), found.setting.full_steps, found.setting.full_from) == (6, 2, 2)


def test_masks_that_all_need_full_steps_get_them_or_a_denser_schedule() -> None:
    every = replace(FOUND, full_from=0)
    found = search_some(Checkpoint(lambda setting: 0.9 + 0.035 * min(setting.full_steps, 2)), every)
    assert found.reaches(0.96)
    assert found.setting.full_steps == 2


def test_full_steps_are_spread_over_the_computed_ones() -> None:
    two = replace(FOUND, computed=(0, 1, 2, 3, 5, 8, 12, 17, 22))
    assert [two.own_page_steps_of(size) for size in range(3)] == [(), (), (0, 3)]
    assert replace(two, full_steps=4).own_page_steps_of(2) == (0, 1, 3, 6)
    assert replace(two, full_steps=4, computed=(0, 2)).own_page_steps_of(2) == (0, 1)
    assert FOUND.own_page_steps_of(2) == (), "leading ones of all steps read the template's pages"


def test_own_pages_for_all_are_chosen_where_that_costs_less() -> None:
    """Priming three keyframes costs more than two full steps of small masks."""
    close = Sized(lambda setting, size: 0.97 if setting.full_steps_of(size) >= 2 or size < 2 else 0.9)
    found = search_steps(close.measure, 28, 0.96, FOUND)
    assert (found.setting.full_steps, found.setting.full_from) == (2, 0)
    assert found.cost(28) < search_some(close).cost(28)
    never = Sized(lambda setting, size: 0.9)
    assert not search_steps(never.measure, 28, 0.96, FOUND).reaches(0.96)


def test_without_a_close_schedule_every_step_is_needed() -> None:
    found = search_some(Checkpoint(lambda setting: 0.9 if setting.computed else 0.97))
    assert found.setting.computed is None or not found.reaches(0.96)


class NoEngine:
    """Of a server that is asked for no edits."""

    model = msgspec.structs.replace(MODEL, page_scheme=SCHEME)

    def generate(self, edits: list[Edit], params: list[SamplingParams], *, use_tqdm: bool) -> list[EditResult]:
        raise AssertionError("nothing is to be measured")

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("before", [3, STEPS])
def test_of_few_steps_all_are_needed(num_steps: int, before: int) -> None:
    with Trials(lambda keyframes, dtype: NoEngine(), before, lambda line: None) as trials:  # type: ignore[arg-type,return-value]
        assert trials.search_steps(CHEAPEST, num_steps, 0.96) is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.integers(1, 10), st.integers(1, 5))
def test_classes_are_equal_parts_in_the_order_of_size(ratios: list[float], least: int, most: int) -> None:
    classes = by_size(ratios, least, most)
    assert sorted(index for part in classes for index in part) == list(range(len(ratios)))
    assert len(classes) == 1 or all(len(part) >= least for part in classes)
    assert len(classes) <= most
    assert max(map(len, classes)) - min(map(len, classes)) <= 1
    ordered = [ratios[index] for part in classes for index in part]
    assert ordered == sorted(ordered)


# ------------------------------------------------------------------------------------------------------------ samples


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two pictures of 128 x 128, one with a mask."""
    for name, colour in (("a.png", "red"), ("b.jpg", "blue")):
        Image.new("RGB", (128, 128), colour).save(tmp_path / name)
    mask = np.zeros((128, 128), np.uint8)
    mask[:32, :64] = 255
    Image.fromarray(mask).save(tmp_path / "a_mask.png")
    (tmp_path / "notes.txt").write_text("not a picture")
    return tmp_path


def test_images_and_prompts_are_taken_in_turn(folder: Path) -> None:
    images = find_images(folder)
    assert [path.name for path in images] == ["a.png", "b.jpg"]
    samples = make_samples(images, ["p", "q", "r"], 4, MODEL)
    assert [(sample.prompt, sample.seed) for sample in samples] == [("p", 0), ("q", 1), ("r", 2), ("p", 3)]
    assert [sample.image.size for sample in samples] == [(64, 64)] * 4


def test_a_mask_beside_its_image_is_used(folder: Path) -> None:
    sample = make_samples(find_images(folder), ["p"], 1, MODEL)[0]
    expected = np.zeros((64, 64), bool)
    expected[:16, :32] = True
    np.testing.assert_array_equal(sample.mask, expected)


def test_a_mask_with_alpha_is_transparent_where_to_edit(folder: Path) -> None:
    pixels = np.full((128, 128, 4), 255, np.uint8)
    pixels[:32, :64, 3] = 0
    Image.fromarray(pixels).save(folder / "a_mask.png")
    sample = make_samples(find_images(folder), ["p"], 1, MODEL)[0]
    assert sample.mask[:16, :32].all()
    assert sample.mask.sum() == 16 * 32


@pytest.mark.parametrize("kind", ["jpg", "webp"])
def test_photos_are_turned_upright_as_edits_turn_them(tmp_path: Path, kind: str) -> None:
    """Their masks are drawn on what is seen."""
    exif, seen = Image.Exif(), Image.new("RGB", (128, 256), "black")
    exif[ExifTags.Base.Orientation] = 6  # turn it by 90 degrees clockwise
    seen.paste("white", (0, 0, 128, 64))
    seen.transpose(Image.Transpose.ROTATE_90).save(tmp_path / f"a.{kind}", exif=exif)
    seen.save(tmp_path / "a_mask.png")
    sample = make_samples(find_images(tmp_path), ["p"], 1, MODEL)[0]
    edit = sample.as_edit()
    assert edit.image is not None
    assert not Image.open(io.BytesIO(encode_picture(edit.image, "image"))).getexif()
    assert sample.image.size == sample.mask.shape[::-1]
    np.testing.assert_array_equal(np.asarray(sample.image.convert("L")) >= 128, sample.mask)


def test_a_picture_with_nonsense_as_its_exif_data_is_taken_as_it_is(tmp_path: Path) -> None:
    Image.new("RGB", (128, 64)).save(tmp_path / "a.png", exif=b"Exif\0\0nonsense")
    width, height = make_samples(find_images(tmp_path), ["p"], 1, MODEL)[0].image.size
    assert width > height


@pytest.mark.parametrize(
    ("size", "colour", "words"), [((64, 64), "white", "image's size"), ((128, 128), "black", "selects nothing")]
)
def test_masks_that_do_not_fit_are_refused(folder: Path, size: tuple[int, int], colour: str, words: str) -> None:
    Image.new("L", size, colour).save(folder / "a_mask.png")
    with pytest.raises(ConfigError, match=words):
        make_samples(find_images(folder), ["p"], 1, MODEL)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 1000))
def test_random_boxes_lie_in_the_picture_and_are_reproducible(width: int, height: int, seed: int) -> None:
    mask = random_box((width, height), "x.png", seed)
    assert mask.shape == (height, width)
    assert mask.any()
    np.testing.assert_array_equal(mask, random_box((width, height), "x.png", seed))
    if min(width, height) >= 50:
        assert 0.02 < mask.mean() < 0.55


# ------------------------------------------------------------------------------------------------------------ command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/m"], "give --images"),
        (["--model", "/m", "--images", "{folder}"], "give --prompt"),
        (["--images", "/nowhere", "--prompt", "p"], "no folder /nowhere"),
        (["--images", "{folder}/empty", "--prompt", "p"], "holds no pictures"),
        (["--images", "{folder}", "--prompts-file", "{folder}/blank.txt"], "holds no prompts"),
    ],
)
def test_a_wrong_command_is_one_line_with_the_remedy(
    folder: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    (folder / "blank.txt").write_text("\n\n")
    assert main([argument.format(folder=folder) for argument in arguments]) == 1
    assert words in one_line_of(capsys)


@pytest.mark.parametrize(("output", "words"), [("none/c.json", "its folder does not exist"), (".", "it is a folder")])
@pytest.mark.parametrize("arguments", [["--images", "{folder}", "--prompt", "p"], ["--skip-levels"]])
def test_where_nothing_can_be_written_nothing_is_measured(
    folder: Path,
    arguments: list[str],
    output: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibrate, "ImageEngine", None)  # it would take minutes
    told = [*(argument.format(folder=folder) for argument in arguments), "--output", str(folder / output)]
    assert main(told) == 1
    assert words in one_line_of(capsys)


def one_line_of(capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that failed has said."""
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error
