"""Videos in simulated time: every policy serves them, times are as the tables say, and the optimum is one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from math import ceil, inf
from pathlib import Path
from statistics import mean

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.baselines.clusters import by_class, isolated
from benchmarks.simulation import videos
from benchmarks.simulation.__main__ import main
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.least_mean import least_mean
from benchmarks.simulation.optimum import Share, batch_model, optimum, partition, queue_model, queue_seconds
from benchmarks.simulation.video_engine import POLICIES, SIZES, serve
from benchmarks.simulation.video_load import TOKENS, Arrival, VideoLoad, assumed
from benchmarks.simulation.videos import Cell, Conclusion, Figures, Result, conclusions

LOAD = msgspec.structs.replace(VideoLoad.read(), steps=4)
MIX = LOAD.mixes[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_every_policy_serves_all(policy: str, rate: float) -> None:
    arrivals = LOAD.arrivals(MIX, 24, rate, seed=1)
    served = serve(LOAD, MIX, arrivals, policy, 8)
    fastest = [min(LOAD.request_seconds(name, degree) for degree in (1, 2, 4, 8)) for _, name in arrivals]
    assert all(latency >= least - 1e-9 for latency, least in zip(served.latencies, fastest, strict=True))
    assert served.device_seconds >= sum(LOAD.request_seconds(name, 1) for _, name in arrivals) * 0.97
    assert rate or mean(served.latencies) >= least_mean(LOAD, 8, (name for _, name in arrivals))


def test_the_least_mean_of_many_is_that_of_the_shortest_first() -> None:
    """Of one class, hardly with loss: half of all work, and of their own."""
    many = least_mean(LOAD, 8, ["144p"] * 400)
    assert many == pytest.approx(LOAD.request_seconds("144p", 1) * (400 / 8 + 1) / 2, rel=0.01)
    assert many <= LOAD.request_seconds("144p", 1) * (400 / 8 + 1) / 2


@pytest.mark.parametrize("name", TOKENS)
def test_the_least_mean_of_one_is_what_it_takes_alone(name: str) -> None:
    alone = min(LOAD.request_seconds(name, degree) for degree in (1, 2, 4, 8))
    assert 0.9 * alone <= least_mean(LOAD, 8, [name]) <= alone


@settings(max_examples=10, deadline=None)
@given(numbers=st.tuples(*[st.integers(0, 12)] * 3).filter(any), degree=st.sampled_from([1, 2, 4]))
def test_no_schedule_has_less_than_the_least_mean(numbers: tuple[int, ...], degree: int) -> None:
    names = [name for name, number in zip(TOKENS, numbers, strict=True) for _ in range(number)]
    served = serve(LOAD, MIX, [Arrival(0.0, name) for name in names], f"SDoP {degree}", 8)
    assert mean(served.latencies) >= least_mean(LOAD, 8, names)


@pytest.mark.parametrize(
    ("policy", "degree", "decoding"),
    [
        ("SDoP 1", 1, 1),
        ("SDoP 4", 4, 4),
        ("SDoP 2 decoupled", 2, 1),
        ("DPCI", 4, 4),
        ("ddit", 4, 1),
        (OURS, 8, 1),
    ],
)
def test_a_lone_request_takes_as_long_as_the_tables_say(policy: str, degree: int, decoding: int) -> None:
    """decoding: devices that are busy with it."""
    served = serve(LOAD, MIX, [Arrival(1.0, "360p")], policy, 8)
    assert served.latencies == [pytest.approx(LOAD.request_seconds("360p", degree), abs=0.01)]
    steps, decode = LOAD.steps * LOAD.step_seconds("360p", degree), LOAD.decode_seconds("360p")
    assert served.device_seconds == pytest.approx(degree * steps + decoding * decode, rel=0.01)


def test_published_times() -> None:
    """At degree 1 decoding is 4.5 % of a 360p request's time, at degree 4 it is 14.3 %."""
    load = VideoLoad.read()
    for degree, share in ((1, 0.045), (4, 0.143)):
        assert load.decode_seconds("360p") / load.request_seconds("360p", degree) == pytest.approx(share, rel=0.01)


def test_numbers_that_are_assumed_are_varied_one_by_one() -> None:
    load = VideoLoad.read()
    numbers = list(assumed(load))
    assert len(numbers) == len({number.name for number in numbers}) == 11
    for number, varied in ((each, varied) for each in numbers for varied in each[1:]):
        before, after = msgspec.to_builtins(load), msgspec.to_builtins(varied)
        assert len([name for name in before if before[name] != after[name]]) <= 1, number.name
        assert varied.speed["360p"][4] == load.speed["360p"][4], "derived from the text"


def test_clusters_are_disjoint_and_as_large_as_the_shares_say() -> None:
    for policy in (
        isolated(64, 4, SIZES, (0.6, 0.3, 0.1)),
        isolated(8, 4, SIZES, (0.6, 0.3, 0.1)),
        by_class(64, (1, 2, 4), SIZES, is_isolated=False),
    ):
        ranks = [rank for cluster in policy._clusters for rank in cluster.ranks]
        assert len(ranks) == len(set(ranks)) <= 64
    sizes = [len(cluster.ranks) for cluster in isolated(64, 4, SIZES, (0.6, 0.3, 0.1))._clusters]
    assert sizes == [40, 20, 4]


# ------------------------------------------------------------------------------------------------------ the optimum


@settings(max_examples=25)
@given(
    machines=st.lists(st.integers(1, 2), min_size=1, max_size=2),
    numbers=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    drawn=st.data(),
)
def test_the_optimum_is_the_least_of_all_choices(machines: list[int], numbers: list[int], drawn: st.DataObject) -> None:
    seconds = [{degree: drawn.draw(st.floats(0.5, 9.0)) for degree in (1, 2)} for _ in numbers]
    ends = [sum(machines[:index]) for index in range(len(machines) + 1)]
    every = list(product(range(ends[-1]), range(1, ends[-1] + 1), (1, 2)))  # (devices left out before, devices, degree)
    least = min(_occupied(ends, choice, seconds, numbers) for choice in product(every, repeat=len(numbers)))
    assert optimum(machines, seconds, batch_model(numbers)).occupied == pytest.approx(least)


def _occupied(
    ends: list[int],
    choice: Sequence[tuple[int, int, int]],
    seconds: Sequence[Mapping[int, float]],
    numbers: Sequence[int],
) -> float:
    total, first = 0.0, 0
    for (gap, size, degree), of_class, number in zip(choice, seconds, numbers, strict=True):
        first += gap
        groups = partition(ends, first, first + size, degree)
        first += size
        if first > ends[-1] or not groups:
            return inf
        total += size * ceil(number / groups) * of_class[degree]
    return total


def test_the_example_of_the_paper() -> None:
    """Two machines of eight devices, of which nine are taken: seven groups of one device, or one group of four."""
    assert [partition((0, 8, 16), 9, 16, degree) for degree in (1, 4)] == [7, 1]
    assert partition((0, 8, 16), 6, 10, 4) == 0, "no group spans machines"


def test_queues() -> None:
    """M/D/1 exactly: 1 / mu + rho / (2 mu (1 - rho)); an empty system takes the service alone, a full one for ever."""
    assert queue_seconds(0.25, 2.0, 1) == pytest.approx(2.0 + 0.5 / (2 * 0.5 * 0.5))
    assert queue_seconds(1e-9, 2.0, 4) == pytest.approx(2.0)
    assert queue_seconds(2.0, 2.0, 4) == inf
    assert queue_seconds(1.0, 2.0, 4) < queue_seconds(1.0, 2.0, 3)


def test_the_optimum_of_a_queue_serves_all_classes() -> None:
    best = optimum([8], [{1: 4.0, 2: 2.0}, {1: 1.0, 2: 1.0}], queue_model([1.0, 0.5]))
    assert best.occupied < inf
    assert sum(share.num_devices for share in best.shares) <= 8
    assert best.shares[1].degree == 1
    assert optimum([2], [{1: 4.0}], queue_model([1.0])) == (inf, ())
    assert optimum([1], [{1: 4.0}], batch_model([3])) == (12.0, (Share(1, 1, 1),))


# ------------------------------------------------------------------------------------------------------ the report


def test_conclusions_compare_what_they_say() -> None:
    def result(cell: Cell, ours: float, static: float) -> Result:
        others = {policy: Figures(static, 2 * static, 20.0) for policy in videos.NEEDED}
        return Result(cell, MIX, others | {OURS: Figures(ours, 2 * ours, 11.0)}, 10.0, 1.0)

    cells = [Cell(8, 0.5, 9), Cell(8, 0.0, 9), Cell(64, 0.0, 9)]
    found = {each.name: each for each in conclusions([result(cell, 5.0, 10.0) for cell in cells])}
    assert found["64 devices, burst: p99 of SDoP 4, mean over mixes"].value == 2.0
    assert all(each.is_met for each in found.values())
    slow = [each.is_met for each in conclusions([result(cell, 9.0, 5.0) for cell in cells])]
    assert slow.count(False) == 9, "all but device time and the ablations"
    assert "NOT met" in Conclusion("x", 2.0, 1.0, is_most=True).text


def test_the_command_prints_every_cell_and_what_is_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(videos, "CELLS", (Cell(8, 1.0, 8), Cell(8, 0.0, 8)))
    monkeypatch.setattr(videos, "MORE_MIXES", ())
    monkeypatch.setattr(VideoLoad, "read", lambda: msgspec.structs.replace(LOAD, steps=2))
    output = tmp_path / "out.json"
    main(["--paper", "ddit", "--processes", "1", "--output", str(output)])
    cells = json.loads(output.read_text())["cells"]
    assert len(cells) == 2 * len(LOAD.mixes)
    assert all(set(cell["policies"]) == set(POLICIES) for cell in cells)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("Assumed", "service seconds of 360p: 13.5", "gain of 240p at degree 4"))
    assert all(f"of {name}" in printed for name in TOKENS)


def test_varying_says_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "VARIED_SEEDS", 1)
    load = msgspec.structs.replace(LOAD, mixes=LOAD.mixes[:1], steps=2)
    lines = list(videos.vary(load, 1, [Cell(8, 0.5, 2), Cell(8, 0.0, 2)]))
    assert sum(line.startswith(("half of", "twice of")) for line in lines) == 22
