"""Twelve workflows on real processes: what is predicted for them, and what is read off the attainments."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from benchmarks.baselines.monoliths import Monoliths, Pool
from benchmarks.serving.lego_layout import write
from benchmarks.serving.lego_prediction import Asked, LoadLine, Measured, predict
from benchmarks.serving.lego_profile import Known
from benchmarks.serving.served_workflows import load_held
from benchmarks.simulation.lego.numbers import Numbers
from benchmarks.simulation.lego.site import Site
from benchmarks.simulation.outside import Crowding, Surroundings
from core.handles import LoadedComponent

SITE = Site(Numbers.read(), "S5", 1, inf)
SECONDS = {"text_encode": 0.1, "image_encode": 0.0, "denoise": 0.2, "decode": 0.3}
AROUND = Surroundings(prepare=0.01, deliver=0.02, trip=0.0, pause=0.0, outside_cpu=0.0)
LOAD = LoadLine(0.0, 1e-10)
WORKFLOWS = [workflow for workflow in SITE.workflows if not workflow.num_nets]


def asked(number: int, due: float, slo_seconds: float) -> Asked:
    """number: of the base model."""
    workflow = WORKFLOWS[number]
    return Asked(SITE.request(0, 0.0, workflow, "node"), workflow.base, due, slo_seconds)


def in_time(every: list[Asked], gigabytes: float, pace: float = 1.0) -> tuple[list[bool], int]:
    sizes = tuple(LoadedComponent(key, nbytes) for key, nbytes in SITE.sizes("node").items())
    ops = {(workflow.base, op): seconds for workflow in WORKFLOWS for op, seconds in SECONDS.items()}
    measured = Measured(ops, {each.base: AROUND for each in WORKFLOWS}, LOAD, Crowding(1.5, 0.0))
    pool = Pool(frozenset(each.base for each in WORKFLOWS), (0,))
    warm_ups = [SITE.request(0, 0.0, workflow, "node") for workflow in WORKFLOWS]
    predicted = predict(
        Known(SITE.infos("node"), sizes, ()),
        measured,
        Monoliths([pool]),
        every,
        warm_ups,
        num_ranks=1,
        model_bytes=round(gigabytes * 1e9),
        pace=pace,
    )
    return predicted.in_time, predicted.num_loads


def alone_seconds() -> float:
    rounds = SITE.numbers.rounds(WORKFLOWS[0].base)
    return SECONDS["text_encode"] + rounds * SECONDS["denoise"] + SECONDS["decode"] + AROUND.prepare + AROUND.deliver


def test_a_lone_request_is_predicted_to_take_what_was_measured() -> None:
    exact = alone_seconds()
    assert in_time([asked(1, 0.0, exact + 0.01), asked(1, 100.0, exact - 0.01)], 60) == ([True, False], 0)


def test_batches_and_loads_may_be_predicted_to_take_longer() -> None:
    exact, load = alone_seconds() + 0.01, LOAD.per_byte * 1e9 * SITE.numbers.gigabytes["sd35l"]
    every = [asked(0, 0.0, 50.0), asked(1, 100.0, 1.05 * (exact + load))]
    assert in_time(every, 28, pace=1.04)[0] == [True, True]
    assert in_time(every, 28, pace=1.06)[0] == [True, False]


def test_loads_count_where_memory_is_short() -> None:
    """What is asked for first needs the first denoiser back, the others the second one's, the first of them after a
    load.
    """
    exact, load = alone_seconds() + 0.01, LOAD.per_byte * 1e9 * SITE.numbers.gigabytes["sd35l"]
    assert in_time([asked(0, 0.0, 50.0), asked(1, 100.0, exact + load), asked(1, 200.0, exact)], 28) == ([True] * 3, 2)
    assert in_time([asked(0, 0.0, 50.0), asked(1, 100.0, exact + load / 2)], 28) == ([True, False], 1)


def test_the_load_held_is_between_two_that_were_measured() -> None:
    assert load_held({0.2: 1.0, 0.8: 0.8}) == pytest.approx(0.4)
    assert load_held({0.8: 0.95, 0.2: 1.0}) == 0.8
    assert load_held({0.2: 0.8, 0.8: 0.1}) is None


def test_separate_workflows_share_no_component(tmp_path: Path) -> None:
    layout = write(tmp_path / "separate", are_separate=True, are_written=False)
    assert layout.distinct_bytes == layout.separate_bytes
    assert "workflow" not in layout.catalog.read_text()
    assert layout.workflows["dev-1"]["control_type"] == ["dev-first-of-dev-1"]
