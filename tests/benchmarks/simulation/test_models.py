"""Models that take turns in the memory of simulated ranks: what ranks hold, how long loads take, and who waits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from benchmarks.simulation.__main__ import main
from benchmarks.simulation.durations import Durations
from benchmarks.simulation.model_engine import Served, serve
from benchmarks.simulation.model_machine import BESIDE_A_LOAD
from benchmarks.simulation.model_ranks import ModelRanks, Poison
from benchmarks.simulation.model_report import ModelRun, least_loads, lru_loads, simulate, table
from benchmarks.simulation.model_scenario import FIVE, MODEL_SCENARIOS, OWN, PAIR, SHARED, ModelScenario
from benchmarks.simulation.model_set import ModelSet, zipf
from benchmarks.simulation.rank_memory import RankMemory
from benchmarks.simulation.ranks import BatchEnded, LoadEnded, LoadsBegun, RankClocks
from core.graph.work import Work
from core.handles import ModelKey
from core.messages.engine import EngineRequest
from core.messages.worker import Batch, Load, ModelFailed, ModelLoaded, StepPlan

A, B = ModelKey("a", "transformer"), ModelKey("b", "transformer")


def short(scenario: ModelScenario, number: int = 60, **changes: object) -> ModelScenario:
    """With few requests of few steps."""
    edits = replace(scenario.edits, num_edits=number, steps=(6,))
    return replace(scenario, edits=edits, **changes)  # type: ignore[arg-type]


def arrivals(scenario: ModelScenario, models: Sequence[str], every: float) -> list[EngineRequest]:
    """A request to each of these models, so many seconds apart."""
    trace = scenario.trace(0)[: len(models)]
    return [
        msgspec.structs.replace(request, model=model, arrival=index * every)
        for index, (request, model) in enumerate(zip(trace, models, strict=True))
    ]


# ------------------------------------------------------------------------------------------------- memory of ranks


def test_a_rank_never_exceeds_its_budget() -> None:
    memory = RankMemory(2, {A: 3, B: 2}, 4)
    memory.start(0, [A])
    with pytest.raises(AssertionError, match="rank 0 holds 5 bytes of 4"):
        memory.begin(0, Load((0,), (B,)))
    memory = RankMemory(2, {A: 3, B: 2}, 4)
    memory.start(0, [A])
    memory.begin(0, Load((0,), (B,), (A,)))
    assert not memory.has(0, [B]), "it is on its way"
    memory.end(0, B, is_loaded=True)
    assert memory.has(0, [B])
    assert not memory.has(0, [A])


def test_a_batch_on_a_rank_without_its_model_is_an_error() -> None:
    memory = RankMemory(1, {A: 3, B: 2}, 0)
    memory.start(0, [A])
    memory.check_has(0, [A])
    for keys, dropped in (([B], []), ([A], [A])):
        with pytest.raises(AssertionError, match="rank 0 has no"):
            memory.check_has(0, keys, dropped)
    memory.lose(0)
    with pytest.raises(AssertionError, match="rank 0 has no"):
        memory.check_has(0, [A])


def test_loads_fail_as_often_as_they_are_to() -> None:
    infos = {name: info for name, info in FIVE.models.infos.items() if name == "0"}
    (key,) = (key for key in FIVE.models.models["0"] if key.component == "transformer")
    ranks = ModelRanks(1, infos, FIVE.models.sizes, 0, Poison(), 0.25, Random(0))
    answers = []
    for _ in range(400):
        ranks.begin_load(Load((0,), (key,)), 0)
        answers.append(ranks.end_load(key, 0, 1.0))
        ranks.begin_load(Load((0,), (), (key,)), 0)
    failed = sum(isinstance(answer, ModelFailed) for answer in answers)
    assert 70 < failed < 130
    assert failed == ranks.num_failed_loads == 400 - len(ranks.loaded)
    assert all(isinstance(answer, ModelLoaded | ModelFailed) for answer in answers)


# ------------------------------------------------------------------------------------------------- time


class Slowed(Durations):
    """Batches take twice as long beside a load."""

    def batch_seconds(self, batch: Batch, work: Work) -> float:
        raise AssertionError("the seconds are given")

    def load_slowness(self) -> float:
        return 2.0


def test_a_rank_loads_one_component_after_the_other_and_is_slower_meanwhile() -> None:
    """Loads from 1 to 3 and from 3 to 4. The first batch begins at 1: of its 2 s it does 1.5 beside loads, until 4, and
    the rest until 4.5. The other rank is not slowed.
    """
    clocks = RankClocks(2, Slowed())
    batches = tuple(Batch(rank, "toy", (rank,), ()) for rank in (0, 1))
    plan = StepPlan(0, loads=(Load((0,), (A, B)),), batches=batches)
    events = clocks.submit(plan, lambda batch: 2.0, lambda key, rank: 2.0 if key == A else 1.0, 1.0)
    loads = [(type(event), event.when) for event in events if isinstance(event, LoadsBegun | LoadEnded)]
    assert loads == [(LoadsBegun, 1.0), (LoadEnded, 3.0), (LoadEnded, 4.0)]
    ends = {event.batch.id: event.when for event in events if isinstance(event, BatchEnded)}
    assert ends == {0: 4.5, 1: 3.0}
    (later, *_) = clocks.submit(StepPlan(1, loads=(Load((0,), (A,)),)), lambda batch: 0.0, lambda key, rank: 1.0, 2.0)
    assert later.when == 4.5, "a rank comes to an order when it has done what it was sent before"


def test_a_request_waits_for_its_load_exactly_as_long_as_the_load_takes() -> None:
    """Each rank has room for one model: the third one is loaded when its request comes."""
    scenario = short(FIVE, fits=1, num_ranks=2)
    alone, seconds = serve(scenario, "default", 0, arrivals(scenario, ["0"], 1.0)), OWN["transformer"] / 5e9
    served = serve(scenario, "default", 0, arrivals(scenario, ["4"], 1.0))
    assert (len(alone.loaded), len(served.loaded)) == (0, 1)
    assert served.latencies["0"] == pytest.approx(alone.latencies["0"] + seconds)
    assert sum(watch.waiting_for_loads for watch in served.watches) == pytest.approx(seconds)
    assert served.waited_for_loads == {"0"}
    assert not served.avoidable
    assert BESIDE_A_LOAD > 1


# ------------------------------------------------------------------------------------------------- what policies make


@pytest.mark.parametrize("policy", ["default", "former goodput"])
@pytest.mark.parametrize("fits", [0, 1, 2, 3])
def test_every_request_is_answered_within_the_budget(policy: str, fits: int) -> None:
    served = serve(short(FIVE, fits=fits), policy, 1)
    assert len(served.latencies) == 60
    assert not served.avoidable
    if fits in (0, 3) and policy == "default":
        assert not served.loaded, "all five are there"
        assert not served.waited_for_loads


def test_more_memory_is_never_slower() -> None:
    """Copies share the steps."""
    means = {fits: mean(serve(short(FIVE, 200, fits=fits), "default", 2)) for fits in (1, 2, 0)}
    assert means[1] > means[2] > means[0]


def mean(served: Served) -> float:
    return sum(served.latencies.values()) / len(served.latencies)


def test_lone_requests_load_as_often_as_the_least_recently_used_is_wanted_again() -> None:
    """By the published approximation, and by counting."""
    models = ModelSet.alike(20, zipf(20, 0.8), OWN, SHARED)
    scenario = short(FIVE, 500, models=models, num_ranks=4, fits=2)
    names = models.draw(np.random.default_rng(3), 500)
    served = serve(scenario, "default", 0, arrivals(scenario, names, 30.0))
    share = len(served.loaded) / 500
    assert share == pytest.approx(lru_loads(models.weights, 8), abs=0.04)
    assert least_loads(names, list(models.models), 8) / 500 < share


def test_engines_behind_a_router_each_keep_a_model() -> None:
    """With room for one on each: while one has more requests, the other is not dropped for them, as it would only have
    to be loaded again.
    """
    scenario = replace(PAIR, edits=replace(PAIR.edits, num_edits=80, load=0.7))
    served = serve(scenario, "default", 0)
    assert len(served.loaded) == 1, "both begin with the first model"
    trace = {request.request_id: request.model for request in scenario.trace(0)}
    homes = [{served.engines[name] for name in trace if trace[name] == model} for model in ("0", "1")]
    assert [len(home) for home in homes] == [1, 1]
    blind = serve(scenario, "default", 0, router="least-requests")
    assert len(blind.loaded) > 10
    assert mean(blind) > 1.5 * mean(served)


def test_a_hot_model_gets_the_engine_of_one_that_nobody_asks_for() -> None:
    scenario = replace(PAIR, edits=replace(PAIR.edits, num_edits=40))
    calm, burst = arrivals(scenario, ["1", *["0"] * 30], 0.05), 30.0
    calm = [calm[0], *(msgspec.structs.replace(each, arrival=each.arrival + burst) for each in calm[1:])]
    served = serve(scenario, "default", 0, calm)
    assert len(served.loaded) == 2, "1 where 0 was, and 0 again"
    assert {served.engines[each.request_id] for each in calm[1:]} == {0, 1}


def test_the_optimum_drops_what_is_needed_last() -> None:
    assert least_loads("abcab", "abc", 3) == 0
    assert least_loads("abcab", "ab", 2) == 2, "c takes the place of b, which comes after a"
    assert least_loads("abab", "", 1) == 4
    assert lru_loads([1.0, 1.0, 1.0, 1.0], 2) == pytest.approx(0.5, abs=1e-6)
    assert lru_loads([3.0, 1.0], 2) == 0.0


def test_what_is_poisonous_ends_ranks_that_come_back() -> None:
    served = serve(short(MODEL_SCENARIOS["poisonous-model"], 80), "default", 0)
    assert served.num_deaths > 0
    assert not served.has_given_up
    poisonous = [request for request in served_models(80) if request.model == "3"]
    assert served.failures.total() == len(poisonous), "its own requests alone fail"


def served_models(number: int) -> list[EngineRequest]:
    return short(MODEL_SCENARIOS["poisonous-model"], number).trace(0)


def test_an_engine_whose_only_rank_keeps_dying_gives_up_and_answers_all() -> None:
    scenario = short(FIVE, num_ranks=1, fits=0, poison_models=frozenset(FIVE.models.models))
    served = serve(scenario, "default", 0)
    assert served.failures.total() == 60
    assert not served.latencies


# ------------------------------------------------------------------------------------------------- the command


def test_the_command_reports_what_loads_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL_SCENARIOS, "five", short(FIVE, 30))
    run = simulate(replace(MODEL_SCENARIOS["five"], fits=1), "default", 0)
    assert 0 < run.wait_for_loads <= 1
    assert run.loads >= run.least_loads > 0
    (head, *_), (row,) = ([*table([run])][i:j] for i, j in ((1, 2), (3, 4)))
    assert head.startswith("five")
    assert row.split()[:2] == ["1", "default"]
    output = tmp_path / "out.json"
    main(["--models", "five", "--fits", "2", "--processes", "1", "--output", str(output)])
    (line,) = output.read_text().splitlines()
    assert msgspec.json.decode(line, type=ModelRun).fits == 2
    assert json.loads(line)["avoidable"] == 0
