"""LegoDiffusion's settings in simulated time: every system serves them, times are as the numbers say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import fmean, stdev

import msgspec
import numpy as np
import pytest

from benchmarks.baselines.monoliths import (
    Monoliths,
    Pool,
    Whole,
    equal_pools,
    groups_that_fit,
    merged,
    planned_pools,
)
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.lego import experiments, version
from benchmarks.simulation.lego.arrivals import Arrivals, Kind
from benchmarks.simulation.lego.bars import bars
from benchmarks.simulation.lego.experiments import (
    EXPERIMENTS,
    HALF_GIGABYTES,
    Record,
    Wanted,
    reference_tasks,
    references,
)
from benchmarks.simulation.lego.measures import TARGET, WORST, Cell, Measured, edge, least_devices, run
from benchmarks.simulation.lego.numbers import ASSUMED, Numbers, varied
from benchmarks.simulation.lego.plots import write_plots
from benchmarks.simulation.lego.production import COLD, TRACED_SYSTEMS, Fleet, TracedSite, p95_wait, requests
from benchmarks.simulation.lego.report import compare, table
from benchmarks.simulation.lego.serving import serve
from benchmarks.simulation.lego.site import Site
from benchmarks.simulation.lego.systems import ABLATIONS, BASELINES, FIXED, SYSTEMS, Offered, System
from benchmarks.simulation.lego.version import version_of
from core.handles import ModelKey

NUMBERS = msgspec.structs.replace(Numbers.read(), most_rounds=2)
POISSON = Arrivals()


def cell(load: float, number: int = 60, setting: str = "S5", devices: int = 4, slo_scale: float = 2.0) -> Cell:
    return Cell(Site(NUMBERS, setting, devices, slo_scale), POISSON, load, number)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_serves_nearly_all_where_little_is_asked_for(system: str) -> None:
    served = run(cell(0.15, setting="S1"), system, seed=0)
    assert served.is_whole
    assert served.in_time > 0.8
    assert served.in_time <= served.begun <= 1.0
    assert served.in_time == pytest.approx(served.begun * (1 - served.broken))


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_admitted_is_mostly_in_time_where_too_much_is_asked_for(system: str) -> None:
    served = run(cell(3.0), system, seed=0)
    assert 0.1 < served.in_time < 0.9
    assert served.broken < 0.5
    assert served.busy <= 1.0


@pytest.mark.parametrize(
    ("system", "degree"),
    [("Diffusers-C", 1), ("pooled", 1), ("lego", 2), (OURS, 2), *((name, int(name[-1])) for name in FIXED)],
)
def test_a_lone_request_takes_as_long_as_the_numbers_say(system: str, degree: int) -> None:
    """A whole workflow has no overhead by node, and one device."""
    lone = Site(NUMBERS, "S1", 2, inf)
    served = serve(lone, system, Offered(POISSON, 0.001, 12, 0), forecast="true")
    base = lone.workflows[0].base
    saved = NUMBERS.solo_seconds[base] * (1 - 1 / NUMBERS.speed_of_two) if degree == 2 else 0.0
    overhead = 0.0 if system in ("Diffusers-C", "pooled") else (NUMBERS.steps[base] + 4) * NUMBERS.node_seconds
    expected = NUMBERS.alone_seconds(lone.workflows[0]) - saved
    assert min(served.latencies) == pytest.approx(expected + overhead, abs=0.02)


def test_models_that_only_some_devices_have_get_two_of_them_for_a_request() -> None:
    """Each device holds one of two base models, and only two devices are fast enough for a request."""
    numbers = msgspec.structs.replace(NUMBERS, device_gigabytes=HALF_GIGABYTES)
    served = run(Cell(Site(numbers, "S6", 8, 1.0), POISSON, 0.3, 60), OURS, seed=0)
    assert served.in_time > 0.9
    assert served.num_loads < 10


def test_a_model_gets_further_devices_when_many_ask_for_it() -> None:
    numbers = msgspec.structs.replace(NUMBERS, device_gigabytes=HALF_GIGABYTES)
    burst = Cell(Site(numbers, "S6", 8, inf), Arrivals("by workflow", 4.0), 0.5, 60)
    served = run(burst, OURS, seed=0)
    assert served.in_time == 1.0
    assert 0 < served.num_loads < 60


def test_a_run_stops_once_it_is_certain_that_too_few_are_in_time() -> None:
    whole, stopped = (run(cell(2.5), "lego", 0, least=least) for least in (0.0, TARGET))
    assert whole.is_whole
    assert not stopped.is_whole
    assert whole.in_time < TARGET
    assert stopped.in_time < TARGET


def test_what_a_device_has_at_first_fits() -> None:
    for setting in NUMBERS.bases:
        for unit in ("node", "workflow", "workflow, shared"):
            site = Site(NUMBERS, setting, 8)
            for rank in range(8):
                there = site.started(unit, rank)
                assert there
                assert sum(site.sizes(unit)[key] for key in there) <= site.budget
    shared = Site(NUMBERS, "S6", 8)
    assert set(shared.started("node", 3)) == set(shared.sizes("node")), "all that is shared fits"
    assert len(shared.started("workflow", 3)) < len(shared.workflows), "whole workflows do not"
    small = Site(varied(NUMBERS, "device_gigabytes", 0.5), "S6", 8)
    denoisers = [{key for key in small.started("node", rank) if key.component == "transformer"} for rank in range(2)]
    assert denoisers == [{ModelKey("flux-s", "transformer")}, {ModelKey("flux-d", "transformer")}]


def test_whole_workflows_are_swapped_where_shared_components_all_fit() -> None:
    alone, shared = (run(cell(0.5, setting="S6"), system, seed=0) for system in ("Diffusers-C", "pooled"))
    assert alone.num_loads > 5
    assert shared.num_loads == 0
    assert shared.in_time > alone.in_time


def test_what_the_parts_of_ours_do_is_switched_off() -> None:
    small = replace(cell(0.5, 10), site=Site(varied(NUMBERS, "device_gigabytes", 37 / 72), "S6", 2))
    served = {name: run(small, name, seed=0) for name in (OURS, "nothing shared", "nothing scaled")}
    assert served["nothing scaled"].num_loads == 0
    assert served["nothing shared"].num_loads > served[OURS].num_loads
    lone = Site(NUMBERS, "S1", 2, inf)
    fastest = [min(serve(lone, name, Offered(POISSON, 0.001, 12, 0)).latencies) for name in (OURS, "one device")]
    assert fastest[1] > 1.3 * fastest[0]
    crowd = [run(cell(3.0, 30), name, seed=0) for name in (OURS, "all admitted")]
    assert crowd[1].begun == 1.0 > crowd[0].begun


def test_components_that_are_not_shared_are_each_workflow_s_own() -> None:
    site = Site(NUMBERS, "S1", 2)
    shared, own = site.sizes("node"), site.sizes("node, unshared")
    assert sum(own.values()) == sum(site.sizes("workflow").values())
    assert sum(shared.values()) == max(site.sizes("workflow").values())
    assert list(site.infos("node")) == ["sd3"]
    assert {name: len(info.controlnets) for name, info in site.infos("node, unshared").items()} == {
        "sd3": 0,
        "sd3+cn1": 1,
        "sd3+cn2": 2,
    }


# ------------------------------------------------------------------------------------------------ production


def test_a_part_of_the_production_trace_is_served() -> None:
    """37 requests, all of which have a picture. Where base models are shared, fewer components are loaded."""
    fleet, traced = Fleet(36.0, num_ranks=3, num_parts=700), requests(0, 700)
    assert len({each.workflow for each in traced}) > len({each.base for each in traced})
    measured = {system: p95_wait(fleet, NUMBERS, system, 0, 0.0) for system in TRACED_SYSTEMS}
    assert measured["pooled"].also[COLD] < measured["Diffusers-C"].also[COLD]
    assert all(each.value > 0.0 for each in measured.values())


def test_loads_take_as_long_as_in_production_and_forecasts_do_not_know_requests() -> None:
    traced = requests(0, 8)
    for unit in ("node", "workflow"):
        site = TracedSite(unit, NUMBERS, traced, seed=1)
        assert 2.0 < min(site.load_seconds.values()) < 4.0 < 40.0 < max(site.load_seconds.values()) < 52.0
        assert len(site.models.models) == len({each.base if unit == "node" else each.workflow for each in traced})
    assert site.op_seconds("pipeline", [3.0, 5.0]) == 8.0


def test_a_whole_workflow_of_several_nodes_takes_as_long_as_one_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what each node takes; and as many requests are in time."""
    pool = Pool(frozenset(NUMBERS.bases["S5"]), tuple(range(4)))
    monkeypatch.setitem(SYSTEMS, "nodes", System("node", lambda site: Monoliths([pool])))
    nodes, whole = (run(cell(0.6), system, seed=0) for system in ("nodes", "pooled"))
    assert fmean(nodes.latencies) == pytest.approx(fmean(whole.latencies), rel=0.1)
    assert nodes.in_time == pytest.approx(whole.in_time, abs=0.1)
    assert nodes.num_loads == whole.num_loads == 0


# ------------------------------------------------------------------------------------------------ arrivals


@pytest.mark.parametrize("kind", ["pooled", "by workflow"])
@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_processes_have_their_rate_and_burstiness(kind: Kind, cv: float) -> None:
    drawn = Arrivals(kind, cv).draw(2.0, 40000, 3, seed=1)
    seconds = [when for when, _ in drawn]
    assert seconds == sorted(seconds)
    assert len(drawn) / seconds[-1] == pytest.approx(2.0, rel=0.1)
    shares = [sum(index == place for _, index in drawn) / len(drawn) for place in range(3)]
    assert shares == pytest.approx(Arrivals(kind, cv).shares(3), abs=0.05)
    mine = seconds if kind == "pooled" else [when for when, index in drawn if index == 0]
    gaps = np.diff(mine).tolist()
    assert stdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.15)


@pytest.mark.parametrize("kind", ["trace", "trace, redrawn"])
def test_the_trace_has_the_mean_rate_that_is_asked_for(kind: Kind) -> None:
    arrivals = Arrivals(kind, 2.0)
    drawn = arrivals.draw(4.0, 500, 6, seed=2)
    assert drawn[0][0] == 0.0
    assert len(drawn) / drawn[-1][0] == pytest.approx(4.0)
    assert {index for _, index in drawn} <= set(range(6))
    assert sum(arrivals.shares(6)) == pytest.approx(1.0)
    assert drawn == arrivals.draw(4.0, 500, 6, seed=2)


# ------------------------------------------------------------------------------------------------ pools


def test_a_planner_serves_more_than_equal_shares_and_groups_fit() -> None:
    models = {"small": Whole(10, 1.0, 0.9), "large": Whole(30, 4.0, 0.05), "other": Whole(20, 1.0, 0.05)}
    assert groups_that_fit(models, 50) == [("large", "other"), ("small",)]
    assert merged([("large",), ("other",), ("small",)], models, 2) == [("small",), ("large", "other")]
    equal = equal_pools(models, 7)
    assert [len(pool.ranks) for pool in equal] == [3, 2, 2]
    names = ["small"] * 18 + ["large", "other"]
    arrivals = [(0.2 * index, names[index % 20]) for index in range(400)]
    planned = planned_pools([(name,) for name in models], models, 7, 2.0, arrivals)
    assert sorted(rank for pool in planned for rank in pool.ranks) == list(range(7))
    ranks = {name: len(pool.ranks) for pool in planned for name in pool.models}
    assert ranks["small"] >= 4


# ------------------------------------------------------------------------------------------------ measures


@pytest.mark.parametrize("start", [0.05, 0.4, 0.85, 2.2])
@pytest.mark.parametrize("most", [0.06, 0.3, 0.9, 1.7])
def test_the_edge_of_what_is_held_does_not_depend_on_where_the_search_starts(most: float, start: float) -> None:
    found = [edge(lambda value: value <= most, near, 0.05, 2.2, stride) for near, stride in ((start, 2), (0.85, 8))]
    assert found[0] == found[1] == pytest.approx(most, rel=0.03)
    assert found[0] <= most


@pytest.mark.parametrize("start", [0.05, 0.85, 2.2])
def test_the_edge_is_within_bounds(start: float) -> None:
    assert edge(lambda value: True, start, 0.05, 2.2, 8) == 2.2
    assert edge(lambda value: False, start, 0.05, 2.2, 8) == 0.0


def test_a_search_that_starts_near_the_edge_is_short() -> None:
    tried = list[float]()

    def is_held(value: float) -> bool:
        tried.append(value)
        return value <= 0.9

    edge(is_held, 0.9, 0.05, 2.2, 2)
    assert len(tried) <= 4


def test_fewer_devices_hold_less() -> None:
    asked = replace(cell(0.3, 40, "S1", 8), num_offered=8)
    found = least_devices(asked, "pooled", 0, 0.0)
    assert 3 <= found.value <= 8
    assert found.also[WORST] > 0.0


# ------------------------------------------------------------------------------------------------ report


def wanted(systems: Sequence[str], seeds: int = 2) -> Wanted:
    return Wanted(NUMBERS, ["S1"], [2], seeds, 30, systems)


def test_a_run_goes_on_from_its_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "records"
    few = compare(["overload"], wanted(["Diffusers-C", OURS], 1), 1, file, tmp_path / "bars.json", tmp_path)
    assert len(few) == 4
    names = [each["name"] for each in json.loads((tmp_path / "bars.json").read_text())]
    assert any("load 2; in time, of what the devices can do" in name for name in names)
    assert "Poisson" in (tmp_path / "lego_overload.svg").read_text()
    lines = file.read_text().splitlines()
    more = compare(["overload"], wanted(["Diffusers-C", "pooled"], 1), 1, file)
    assert file.read_text().splitlines()[: len(lines)] == lines
    assert len(more) == 4
    shown = compare(["overload"], wanted(["Diffusers-C", "pooled"], 2), 0, file)
    assert [each.task for each in shown] == [each.task for each in more], "nothing is run"
    printed = capsys.readouterr().out
    assert "Poisson, pooled" in printed, "arrivals are stated"
    assert all(name.replace("_", " ") in printed for name in ASSUMED)


def test_a_search_begins_at_the_seed_before_or_at_the_best_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, begun = {"Diffusers": 0.5, "pooled": 0.8, OURS: 1.0}, dict[tuple[str, int], float]()

    def note(cell: Cell, system: str, seed: int, near: float) -> Measured:
        begun[system, seed] = near
        return Measured(held[system] + seed)

    monkeypatch.setattr(experiments, "most_load", note)
    compare(["rate"], wanted(["Diffusers", "pooled"], 1), 1, tmp_path / "records")
    compare(["rate"], wanted([OURS], 2), 1, tmp_path / "records")
    assert begun == {("Diffusers", 0): 0.0, ("pooled", 0): 0.0, (OURS, 0): 0.8, (OURS, 1): 1.0}


def test_advantages_are_of_pairs() -> None:
    ours, theirs = (2.0, 4.0), (1.0, 4.0)
    records = [
        Record("rate", "a cell", "load held", name, seed, values[seed], "few requests")
        for name, values in ((OURS, ours), (BASELINES[0], theirs))
        for seed in range(2)
    ]
    lines = list(table(records))
    assert any("ours 1.50x" in line for line in lines)
    assert any(f"best of the paper's baselines: {BASELINES[0]}" in line for line in lines)


def test_every_experiment_has_tasks_and_reference_loads_are_means() -> None:
    every = wanted(list(SYSTEMS))
    records = [
        Record(task.experiment, task.name, task.unit, task.system, task.seed, 1.0 + task.seed, task.effort)
        for task in reference_tasks(every)
    ]
    found = references(records)
    assert set(found.values()) == {1.5}
    for name, experiment in EXPERIMENTS.items():
        tasks = list(experiment(every, found))
        assert tasks, name
        assert len({task.key for task in tasks}) == len(tasks), "no two tasks have one name"
        assert {task.experiment for task in tasks} == ({name, "rate"} if name == "true" else {name})


def test_records_of_another_version_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a policy: a change of ours leaves the records of others as they are."""
    file = tmp_path / "records"
    first = compare(["overload"], wanted(["Diffusers-C"], 1), 1, file)
    with monkeypatch.context() as patch:
        patch.setattr(version, "SIMULATION", version.SIMULATION + 1)
        version_of.cache_clear()
        assert not compare(["overload"], wanted(["Diffusers-C"], 1), 0, file)
    version_of.cache_clear()
    assert len(compare(["overload"], wanted(["Diffusers-C"], 1), 0, file)) == len(first)
    assert len({version_of(name) for name in (OURS, "lego", "pooled", *FIXED)}) == 4
    assert {version_of(name) for name in ABLATIONS} == {version_of(OURS)}


def test_what_is_broken_has_no_record(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(cell: Cell, system: str, seed: int, near: float) -> Measured:
        assert system != "pooled", "a request is left"
        return Measured(1.0)

    monkeypatch.setattr(experiments, "served_load", breaks)
    found = compare(["overload"], wanted(["Diffusers-C", "pooled"], 1), 1, None)
    assert {each.system for each in found} == {"Diffusers-C"}
    assert "BROKEN" in (printed := capsys.readouterr().out)
    assert "a request is left" in printed


def few(experiment: str, cell: str, *, is_more_better: bool = True, **values: tuple[float, ...]) -> list[Record]:
    return [
        Record(experiment, cell, "unit", name.replace("_", " "), seed, value, "few requests", is_more_better)
        for name, of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]


def test_bars_are_met_or_missed_by_paired_ratios(tmp_path: Path) -> None:
    records = [
        *few("rate", "S5, 8 devices, Poisson", default=(1.0, 1.2), lego=(0.9, 1.1), Diffusers=(0.5, 0.5)),
        *few("degrees", "S1, load 0.9", is_more_better=False, default=(4.0,), degree_1=(5.0,), degree_2=(3.9,)),
        *few("devices", "S6, Poisson", is_more_better=False, default=(4.0, 5.0), pooled=(5.0, 5.0), lego=(8.0, 9.0)),
    ]
    found = {each.name.partition("; ")[2]: each for each in bars(records)}
    assert found["ours / lego; 2 seeds"].value == pytest.approx((1 / 0.9 + 1.2 / 1.1) / 2)
    texts = {name: each.text.rpartition(": ")[2] for name, each in found.items()}
    assert texts["ours / degree 2; 1 seed"] == "NOT met)"
    assert texts["ours - pooled; 2 seeds"] == "NOT met)"
    assert found["ours / degree 1; 1 seed"].interval is None
    assert found["ours - pooled; 2 seeds"].value == -0.5
    write_plots(tmp_path, records)
    assert "S6, Poisson" in (tmp_path / "lego_devices.svg").read_text()
