"""What the soak concludes from answers and from memory, with answers and memory that are made up."""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.load.client import Answer
from benchmarks.load.pictures import Pixels
from benchmarks.soak.__main__ import Record, _check_resumes, _report
from benchmarks.soak.checking import Ledger, References
from benchmarks.soak.edits import PLAIN, Delivery, Edit, catalogue, fresh, template
from benchmarks.soak.memory import MB, Holdings, Sample, Samples, WorkerMemory
from benchmarks.soak.resumes import MESSAGE, Resumes
from benchmarks.soak.setups import SINGLE_DEATHS

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


def answer(*pictures: bytes, first_seed: int = 5) -> Answer:
    return Answer(list(map(in_base64, pictures)), [first_seed + index for index in range(len(pictures))])


def in_base64(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


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
        (answer(painted(10), painted(20), first_seed=6), {"compared": 2, "wrong": 1}),
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
    came.partials = [(index, in_base64(painted(colour))) for index, colour in previews]
    return came


@pytest.mark.parametrize(
    ("came", "expected"),
    [
        (streamed((0, 1), (1, 2), (2, 3)), {"compared": 4}),
        (streamed((0, 2), (1, 3)), {"lost": 1}),
        (streamed(), {"lost": 1}),
        (streamed((0, 1), (2, 3), (1, 2)), {"lost": 1}),
        (streamed((0, 1), (1, 2), (2, 3), (3, 3)), {"lost": 1}),
        (streamed((0, 1), (1, 9), (2, 3)), {"compared": 4, "wrong": 1}),
        (streamed((0, 2), (1, 1), (2, 3)), {"compared": 4, "wrong": 2}),
    ],
    ids=["all", "one left out", "all left out", "out of order", "too many", "another", "under each other's numbers"],
)
def test_partial_images_are_all_there_and_those_of_the_reference(
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


def test_edits_are_of_all_models_and_depend_on_nothing_else() -> None:
    models = ["a", "b", "c"]
    edits = catalogue(models)
    assert [replace(edit, model="") for edit in edits] == [*catalogue()]
    assert {edit.fields["model"] for edit in edits} == {*models}
    assert not any("model" in edit.fields for edit in catalogue())


def held(megabytes: float, age: float = 0.0, pid: int = 1) -> Holdings:
    """A tree of one worker, of that age, and a server of 100 MB."""
    nbytes = int(megabytes * MB)
    memory = Counter(server=int(100 * MB), worker=nbytes)
    return Holdings(memory, Counter(worker=7), [WorkerMemory(pid, age, nbytes)])


def test_the_slope_of_the_tree() -> None:
    """Each minute counts with its median, and only what was whole."""
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


@pytest.mark.parametrize("leak", [0.0, 3.0])
def test_a_worker_grows_by_what_it_leaks_whenever_it_was_started(leak: float) -> None:
    """MB per minute. Later lives are longer, which is what tilts the slope of the tree; the warm-up is steep."""
    samples, second = Samples(0.0), 0
    for life in range(1, 9):
        for age in range(0, 120 + 30 * life, 5):
            megabytes = 400 + life + min(age, 100) + leak * age / 60
            samples.add(Sample(second, held(megabytes, age, pid=life), is_whole=True))
            samples.add(Sample(second, held(9 * second, age, pid=life), is_whole=False))
            second += 5
    assert samples.worker_growth() == pytest.approx(leak, abs=0.01)
    assert samples.num_worker_lives() == 8
    assert 500 <= samples.warm_worker() - leak * 2 < 520
    assert samples.memory_slope() > 1


def test_a_new_maximum_of_a_workers_heap_comes_once() -> None:
    samples = Samples(0.0)
    for age in range(120, 420, 5):
        samples.add(Sample(age, held(500 + 15 * (age > 300), age), is_whole=True))
    assert samples.worker_growth() == pytest.approx(0)


def test_growth_of_workers_that_were_never_seen_warm() -> None:
    samples = Samples(0.0)
    for age in range(0, 120, 5):
        samples.add(Sample(age, held(400, age), is_whole=True))
    assert math.isnan(samples.worker_growth())
    assert math.isnan(samples.warm_worker())


# --------------------------------------------------------------------------------------------------------- the verdict


def growing(server: float, worker: float, minutes: int) -> Samples:
    """One sample a minute; MB that each grows by from one to the next."""
    samples = Samples(0.0)
    for minute in range(minutes):
        tree = held(400 + minute * worker, age=60.0 * minute)
        tree.memory["server"] += int(minute * server * MB)
        samples.add(Sample(60.0 * minute, tree, is_whole=True))
    return samples


@pytest.mark.parametrize(
    ("minutes", "samples", "compared", "faults", "is_good"),
    [
        (10.0, growing(0.0, 0.0, 10), 5, None, True),
        (10.0, growing(2.0, 0.0, 10), 5, None, False),
        (10.0, growing(0.0, 1.2, 10), 5, ["burst", "disk full"], False),
        (10.0, growing(0.0, 1.2, 10), 5, ["burst", "worker killed"], True),
        (10.0, growing(0.0, 0.0, 2), 5, None, False),
        (9.0, growing(0.0, 0.0, 2), 5, None, True),
        (10.0, growing(0.0, 0.0, 10), 0, None, False),
    ],
    ids=["good", "leak", "a worker leaks", "none gets warm", "no slope", "too short for one", "nothing compared"],
)
def test_a_soak_that_measured_nothing_is_not_good(
    ledger: Ledger, minutes: float, samples: Samples, compared: int, faults: list[str] | None, is_good: bool
) -> None:
    ledger.count("compared", compared)
    setup = {"single_deaths": False, "turns": False, "joint_steps": False, "ray": False}
    args = argparse.Namespace(minutes=minutes, output=None, faults=faults, **setup)
    assert _report(args, ledger, Record(samples)) is is_good


# ------------------------------------------------------------------------------------------------- single deaths


def logged(*repeated: int) -> str:
    """A server's log of requests that went on after a death, with a checkpoint every 8 steps."""
    facts = [{"steps_done": 16, "steps_repeated": number, "steps_between": 8} for number in repeated]
    lines = [{"level": "info", "message": MESSAGE, **each} for each in facts]
    return "\n".join(["no JSON", *map(json.dumps, lines), json.dumps({"message": "worker 0 serves again"})])


@pytest.mark.parametrize(
    ("repeated", "by_metrics", "restarts", "failures"),
    [
        ((0, 9), 9, 0, []),
        ((3, 10), 13, 0, ["1 times too many steps were repeated after a death"]),
        ((3, 4), 7, 1, ["1 restarts of engines, although only workers died"]),
        ((3, 4), 20, 0, ["the metrics say 20 steps repeated, the log: 2 requests went on, 7 steps repeated"]),
        ((), 0, 0, ["the metrics say 0 steps repeated, the log: 0 requests went on, 0 steps repeated"]),
    ],
    ids=["good", "too many steps", "an engine restarted", "not all logged", "nobody was hit"],
)
def test_single_deaths_take_a_bounded_number_of_steps(
    tmp_path: Path, repeated: tuple[int, ...], by_metrics: int, restarts: int, failures: list[str]
) -> None:
    log = tmp_path / "server.log"
    log.write_text(logged(*repeated))
    record = Record(Samples(0.0), restarts=restarts, steps_repeated=by_metrics, resumes=Resumes.of_log(log))
    _check_resumes(SINGLE_DEATHS, record)
    assert len(record.failures) == len(failures)
    assert all(told.startswith(expected) for told, expected in zip(record.failures, failures, strict=True))
