"""The arena: contests are paired and deterministic, verdicts say what the figures do, and broken policies are named."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from benchmarks.baselines.former.step_batching import StepBatching
from benchmarks.simulation import module_engine
from benchmarks.simulation.__main__ import main
from benchmarks.simulation.arena import one_rank, overload, production_trace, traced_models
from benchmarks.simulation.arena.contest import IN_TIME, MEAN, Contest, Metric, Values
from benchmarks.simulation.arena.one_engine import OneEngine
from benchmarks.simulation.arena.perturbed import Perturbed
from benchmarks.simulation.arena.picture_load import KINDS, PictureLoad
from benchmarks.simulation.arena.scenarios import SCENARIOS
from benchmarks.simulation.arena.table import summary
from benchmarks.simulation.arena.tournament import play
from benchmarks.simulation.arena.verdict import half_interval, verdict
from benchmarks.simulation.compared import FORMER, OURS, make
from benchmarks.simulation.module_trace import ModuleTrace
from benchmarks.simulation.published import DATA

COST = Metric("cost")


def contest(share: float = 0.02, number: float = 0.0) -> Contest:
    return Contest("c", lambda policy, seed: {}, (OURS, *FORMER), (COST, IN_TIME), share=share, number=number)


def results(**of: list[float]) -> dict[str, list[Values]]:
    names = {"ours": OURS, "first": "former step_batching", "second": "former goodput"}
    return {names[name]: [{COST: value, IN_TIME: value} for value in values] for name, values in of.items()}


# ------------------------------------------------------------------------------------------------------ verdicts


def test_ours_is_compared_with_the_best_former_policy() -> None:
    found = results(ours=[1.0, 2.0], first=[2.0, 3.0], second=[3.0, 5.0])
    cost, in_time = (verdict(contest(), metric, found) for metric in (COST, IN_TIME))
    assert cost is not None
    assert in_time is not None
    assert (cost.best, cost.gain, cost.interval, cost.word) == ("former step_batching", 1.0, 0.0, "better")
    assert (in_time.best, in_time.gain, in_time.word) == ("former goodput", -2.5, "equal"), "two seeds say little"
    assert in_time.interval == pytest.approx(12.706 * 0.5)


@pytest.mark.parametrize(
    ("ours", "share", "number", "word"),
    [(101.9, 0.02, 0.0, "equal"), (102.1, 0.02, 0.0, "WORSE"), (102.1, 0.0, 3.0, "equal"), (109.0, 0.1, 0.0, "equal")],
)
def test_a_policy_may_fall_behind_by_so_much(ours: float, share: float, number: float, word: str) -> None:
    found = verdict(contest(share, number), COST, results(ours=[ours], first=[100.0]))
    assert found is not None
    assert found.word == word


def test_the_interval_is_that_of_the_mean_of_the_differences() -> None:
    assert half_interval([3.0]) == 0.0
    assert half_interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)


def test_without_ours_or_a_former_policy_there_is_no_verdict() -> None:
    assert verdict(contest(), COST, results(first=[1.0])) is None
    assert verdict(contest(), COST, results(ours=[1.0])) is None
    assert verdict(contest(), COST._replace(is_judged=False), results(ours=[1.0], first=[1.0])) is None


def _stuck(policy: str, seed: int) -> Values:
    if policy == "former goodput" and seed:
        raise AssertionError("requests are left")
    return {MEAN: float(seed)}


def test_a_policy_that_breaks_in_one_run_is_named_and_the_others_go_on() -> None:
    (played,) = play([("s", [Contest("c", _stuck, tuple(FORMER), (MEAN,))])], None, 3, 1)
    assert played.results["former elastic"] == [{MEAN: 0.0}, {MEAN: 1.0}, {MEAN: 2.0}]
    assert list(played.results) == ["former step_batching", "former elastic"]
    assert dict(played.broken) == {"former goodput": "seed 1: requests are left"}
    assert "BROKEN s: c, former goodput: seed 1: requests are left" in list(summary([played], ()))


# ------------------------------------------------------------------------------------------------------ loads


def test_requests_and_objectives_are_as_drawn() -> None:
    load = PictureLoad(0.8, number=400, owners=(0.8, 0.2))
    requests = load.requests(3)
    assert requests == load.requests(3)
    assert all(one.arrival < other.arrival for one, other in pairwise(requests))
    assert requests[-1].arrival == pytest.approx(400 / (0.8 * load.capacity), rel=0.15)
    assert sum(each.objective is not None for each in requests) / 400 == pytest.approx(1 / 3, abs=0.07)
    assert sum(each.owner == "owner 0" for each in requests) / 400 == pytest.approx(0.8, abs=0.07)
    for each in requests:
        scale = 0.0 if each.objective is None else (each.objective - each.arrival) / load.alone_seconds_of(each)
        assert not scale or 1.49 < scale < 4.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_request_takes_its_time_alone(kind: str) -> None:
    """With the policy that chooses degrees, and twice as long where the machine is half as fast."""
    load = PictureLoad(0.1, number=1, shares=tuple(float(kind == each) for each in KINDS))  # type: ignore[arg-type]
    requests = load.requests(0)
    for machine, factor in ((None, 1.0), (Perturbed(load.machine, others=2.0), 2.0)):
        (seconds,) = OneEngine(4, true=machine).serve(make("former elastic"), requests).values()
        assert seconds == pytest.approx(factor * load.alone_seconds_of(requests[0]), rel=0.02)


def test_a_slow_rank_slows_what_runs_on_it() -> None:
    requests = PictureLoad(0.5, number=8, shares=(1.0, 0.0, 0.0)).requests(0)
    machine = PictureLoad(0.5).machine
    seconds = [
        fmean(OneEngine(4, true=Perturbed(machine, ranks=ranks)).serve(make("former step_batching"), requests).values())
        for ranks in ({}, {0: 2.0}, {3: 2.0})
    ]
    assert seconds[1] > 1.8 * seconds[0], "the steps are on rank 0"
    assert seconds[0] < seconds[2] < 1.3 * seconds[0], "the decodes on the last"


def test_a_window_of_the_trace_has_the_load_asked_for() -> None:
    requests = traced_models.window(traced_models.SCENARIO, 0.2, 1)
    work = sum(traced_models.SCENARIO.alone_seconds(each) for each in requests)
    assert work / requests[-1].arrival / traced_models.SCENARIO.num_ranks == pytest.approx(0.2)
    assert len({each.model for each in requests}) > 10
    every = list(production_trace.read())
    assert (len(every), len({each.model for each in every})) == (26_823, 87)


# ------------------------------------------------------------------------------------------------------ contests


def test_all_scenarios_have_named_contests_of_known_policies() -> None:
    for scenario in SCENARIOS.values():
        contests = scenario.contests()
        assert len({each.name for each in contests}) == len(contests)
        assert {each.policies for each in contests} == {scenario.policies}
        assert all(set(each.former) and OURS in each.policies for each in contests)


@pytest.mark.parametrize("scenario", ["mixed", "overload", "one-rank"])
def test_equal_arguments_give_equal_values(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "NUMBER", 16)
    first = SCENARIOS[scenario].contests()[0]
    values = [first.play("former step_batching", seed) for seed in (1, 1, 2)]
    assert values[0] == values[1] != values[2]
    assert set(values[0]) == set(first.metrics)


def test_admission_leaves_it_to_policies_that_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """At twice the knee more is in time than without a policy that knows the objective."""
    monkeypatch.setattr(overload, "NUMBER", 60)
    twice = overload.contests()[1]
    in_time = {policy: twice.play(policy, 0)[IN_TIME] for policy in ("former goodput", "former step_batching")}
    assert in_time["former goodput"] > in_time["former step_batching"] > 0.3


def test_the_most_overtaken_request() -> None:
    """Of two owners whose last request is the first to end, and of one owner."""
    load = PictureLoad(1.0, number=3, shares=(0.0, 1.0, 0.0), aimed=0.0, owners=(0.5, 0.5))
    requests = load.requests(0)
    own = [msgspec.structs.replace(each, owner=owner) for each, owner in zip(requests, "aba", strict=True)]
    ends = dict(zip("012", (30.0, 40.0, 5.0), strict=True))
    latencies = {each.request_id: requests[-1].arrival + ends[each.request_id] - each.arrival for each in own}
    alone = load.alone_seconds("middle", 0)
    assert one_rank.most_overtaken(load, own, latencies) == pytest.approx(alone), "by the other owner's alone"
    same = [msgspec.structs.replace(each, owner="a") for each in own]
    assert one_rank.most_overtaken(load, same, latencies) == pytest.approx(alone)


def test_policies_that_load_nothing_serve_a_trace_on_ranks_that_have_different_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `default` does. No rank is sent what it has no component for, or the requests would be left."""
    trace = ModuleTrace.read(DATA / "sd15_256.json")
    cell = next(trace.cells())
    few = msgspec.structs.replace(
        trace,
        num_requests=20,
        steps=[steps // 4 for steps in trace.steps[:20]],
        intervals_seconds={name: gaps[:20] for name, gaps in trace.intervals_seconds.items()},
    )
    monkeypatch.setitem(module_engine.POLICIES, "still", partial(module_engine.resident, StepBatching))
    monkeypatch.setattr(module_engine, "RESIDENT", frozenset({"still"}))
    served = module_engine.serve(few, cell, "still")
    assert served.goodput == module_engine.serve(few, cell, "former step_batching").goodput


def test_the_command_prints_verdicts_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overload, "NUMBER", 16)
    few = SCENARIOS["overload"]._replace(contests=lambda: overload.contests()[:2])
    monkeypatch.setitem(SCENARIOS, "overload", few)
    output = tmp_path / "arena.json"
    flags = ["--only", "overload", "--seeds", "2", "--processes", "1"]
    main(["--arena", *flags, "--output", str(output), "--plots", str(tmp_path)])
    found = json.loads(output.read_text())
    assert [each["contest"] for each in found["contests"]] == ["1 rank, at the knee", "1 rank, at twice the knee"]
    for each in found["contests"]:
        assert each["values"].keys() == {*FORMER, OURS, "neustream"} - each["broken"].keys()
        assert all(len(of["in time"]) == 2 for of in each["values"].values())
        assert set(each["verdicts"]) == ({"in time"} if OURS in each["values"] else set())
    assert (tmp_path / "arena_in_time.svg").stat().st_size > 1000
    assert "overload: 1 rank, at the knee" in capsys.readouterr().out
