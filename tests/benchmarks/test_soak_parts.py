"""What the soak concludes from answers and from memory, with answers and memory that are made up."""

from __future__ import annotations

import argparse
import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.soak import Record, _report
from benchmarks.soaking.checking import References
from benchmarks.soaking.edits import PLAIN, Delivery, Edit, catalogue, fresh
from benchmarks.soaking.ledger import Ledger
from benchmarks.soaking.memory import MB, Sample, Samples
from benchmarks.soaking.pictures import Pixels, template
from benchmarks.soaking.sending import Answer
from benchmarks.soaking.tree import Holdings

EDIT = Edit("some", template=1, shape="small", prompt="a hat", seed=5, steps=4, n=2)


def file_of(pixels: Pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def painted(colour: int, outside: int = 0) -> bytes:
    """EDIT's picture with one colour under the mask; outside: added to what must stay."""
    pixels = template(1).copy()
    assert EDIT.inside is not None
    pixels[EDIT.inside] = colour
    pixels[~EDIT.inside] += np.uint8(outside)
    return file_of(pixels)


def answer(*pictures: bytes) -> Answer:
    return Answer(list(pictures), [5 + index for index in range(len(pictures))])


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


@pytest.fixture
def references(ledger: Ledger) -> References:
    references = References(ledger)
    references.learn(EDIT, PLAIN, answer(painted(10), painted(20)))
    return references


@pytest.mark.parametrize(
    ("came", "expected"),
    [
        (answer(painted(10), painted(20)), {"compared": 2}),
        (answer(painted(11), painted(20)), {"compared": 2, "wrong": 1}),
        (answer(painted(20), painted(10)), {"compared": 2, "wrong": 2}),
        (answer(painted(10)), {"lost": 1}),
        (answer(painted(10), painted(20, outside=1)), {"compared": 2, "wrong": 2}),
        (Answer([painted(10), painted(20)], [6, 7]), {"compared": 2, "wrong": 1}),
    ],
    ids=["right", "all pixels one level off", "swapped", "one missing", "outside", "of other seeds"],
)
def test_answers_are_judged(references: References, ledger: Ledger, came: Answer, expected: dict[str, int]) -> None:
    references.judge(EDIT, PLAIN, came)
    assert ledger.counts == expected
    incidents = ledger.incidents_file.read_text().splitlines() if ledger.incidents_file.exists() else []
    assert Counter(json.loads(line)["kind"] for line in incidents) == Counter(expected) - Counter(compared=2)


def test_a_single_level_here_and_there_is_rounding(references: References, ledger: Ledger) -> None:
    pixels = np.asarray(Image.open(io.BytesIO(painted(10)))).copy()
    row, column = np.argwhere(EDIT.inside)[0]
    pixels[row, column, 0] += 1
    references.judge(EDIT, PLAIN, answer(file_of(pixels), painted(20)))
    assert ledger.counts == {"compared": 2, "rounded": 1}


STREAM = Delivery(way="stream")
STREAMED = Edit("streamed", 1, "small", "a hat", 5, 8, partial_images=3)


def streamed(*previews: tuple[int, int]) -> Answer:
    """previews: (index, colour)."""
    came = answer(painted(10))
    came.partials = [(index, painted(colour)) for index, colour in previews]
    return came


@pytest.mark.parametrize(
    ("came", "expected"),
    [
        (streamed((0, 1), (1, 2), (2, 3)), {"compared": 4}),
        (streamed((0, 2), (1, 3)), {"compared": 3, "previews_skipped": 1}),
        (streamed(), {"compared": 1, "previews_skipped": 3}),
        (streamed((1, 1), (0, 2)), {"lost": 1}),
        (streamed((0, 1), (1, 2), (2, 3), (3, 3)), {"lost": 1}),
        (streamed((0, 1), (1, 9)), {"compared": 3, "previews_skipped": 1, "wrong": 1}),
        (streamed((0, 3), (1, 1)), {"compared": 2, "previews_skipped": 1, "wrong": 1}),
    ],
    ids=["all", "the first left out", "all left out", "out of order", "too many", "another", "an earlier one"],
)
def test_partial_images_may_be_left_out_but_are_those_of_the_reference(
    ledger: Ledger, came: Answer, expected: dict[str, int]
) -> None:
    references = References(ledger)
    references.learn(STREAMED, STREAM, streamed((0, 1), (1, 2), (2, 3)))
    references.judge(STREAMED, STREAM, came)
    assert Counter(expected) == ledger.counts


def test_an_answer_with_the_id_of_another_is_wrong(ledger: Ledger) -> None:
    for request_id in ("a", "b", "a"):
        ledger.saw_request_id(request_id)
    assert ledger.counts == {"wrong": 1}


def test_edits_are_different_and_the_same_in_every_run() -> None:
    edits = [*catalogue(), *map(fresh, range(20))]
    assert len({edit.name for edit in edits}) == len(edits)
    assert len({template(number).tobytes() for number in {e.template for e in edits} - {None}}) == 8 + 20


def held(megabytes: float) -> Holdings:
    return Holdings(Counter(worker=int(megabytes * MB)), Counter(worker=7), Counter(), Counter())


def test_a_saw_of_restarts_is_no_growth_and_a_leak_is() -> None:
    leaking, sawing = Samples(120), Samples(120)
    for second in range(0, 1200, 10):
        saw = 40 * (second % 60 < 20)  # twenty seconds in which a new engine holds less, say
        leak = 2 * second / 60 + (500 if second < 120 else 0)
        for samples, megabytes in ((sawing, 900 - saw), (leaking, 900 - saw + leak)):
            samples.add(Sample(second, held(megabytes), is_whole=True))
            samples.add(Sample(second, held(9 * second), is_whole=False))
    assert abs(sawing.memory_slope()) < 0.01
    assert leaking.memory_slope() == pytest.approx(2, abs=0.05)
    assert leaking.memory_slope("server") == pytest.approx(0)
    assert leaking.fds("worker") == (7, 7)


# --------------------------------------------------------------------------------------------------------- the verdict


def growing(megabytes_per_minute: float, minutes: int) -> Samples:
    """One sample a minute."""
    samples = Samples(0.0)
    for minute in range(minutes):
        pss = Counter(server=int((100 + minute * megabytes_per_minute) * MB))
        samples.add(Sample(60.0 * minute, Holdings(pss, Counter(), Counter(), Counter()), is_whole=True))
    return samples


@pytest.mark.parametrize(
    ("minutes", "samples", "compared", "is_good"),
    [
        (10.0, growing(0.0, 10), 5, True),
        (10.0, growing(2.0, 10), 5, False),
        (10.0, growing(0.0, 2), 5, False),
        (9.0, growing(0.0, 2), 5, True),
        (10.0, growing(0.0, 10), 0, False),
    ],
    ids=["good", "leak", "no slope", "too short for one", "nothing compared"],
)
def test_a_soak_that_measured_nothing_is_not_good(
    ledger: Ledger, minutes: float, samples: Samples, compared: int, is_good: bool
) -> None:
    ledger.count("compared", compared)
    assert _report(argparse.Namespace(minutes=minutes), ledger, Record(samples)) is is_good
