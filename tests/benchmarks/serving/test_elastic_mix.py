"""The mix of large and small edits: drawn alike for every system, and judged by what all of them answer."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.load.client import Outcome, Run
from benchmarks.serving.elastic_mix import FORMER, KINDS, Comparison, Served, against_others, draw, systems
from benchmarks.serving.recorded import Batch
from benchmarks.simulation.compared import OURS


def test_every_kind_is_drawn_in_its_share_and_alike_for_a_seed() -> None:
    kinds, calls = draw(200, seed=3)
    again, same = draw(200, seed=3)
    assert (kinds, calls) == (again, same)
    assert draw(200, seed=4)[0] != kinds
    for name, number in Counter(kinds).items():
        assert number / 200 == pytest.approx(KINDS[name].share, abs=0.1)


def test_edits_share_pictures_only_where_their_kind_has_templates() -> None:
    kinds, calls = draw(60, seed=0)
    for name, kind in KINDS.items():
        images = [call.image for kind_name, call in zip(kinds, calls, strict=True) if kind_name == name]
        assert len(set(images)) == (kind.templates or len(images))


def outcome(latency: float, degrees: list[int], error: str = "") -> Outcome:
    return Outcome(0.0, 0.0, latency, None, error, {"degrees": degrees, "primed": len(degrees) == 1})


def batch(seconds: float, *requests: str) -> Batch:
    return Batch(0, "denoise", requests, 0.0, 0.0, seconds, 1, 0.0, 0.0)


def test_steps_are_counted_by_degree_and_latencies_by_kind() -> None:
    compared, run = Comparison(), Run([outcome(1.0, [1, 1]), outcome(3.0, [1, 2])], 4.0, 0.0)
    compared.add(["256 px", "1024 px"], run, [batch(1.5, "a", "b"), batch(0.25)])
    assert (compared.measured.mean, compared.measured.p99) == (2.0, 3.0)
    assert compared.measured.by_kind == {"256 px": [1.0], "1024 px": [3.0]}
    assert compared.measured.num_steps == {1: 3, 2: 1}
    assert (compared.measured.worker_seconds, compared.cache_seconds) == (1.75, 0.25)
    assert compared.num_primed == 0


def test_what_was_measured_is_told_beside_what_is_predicted() -> None:
    compared = Comparison()
    compared.add(["256 px", "1024 px"], Run([outcome(1.0, [1]), outcome(4.0, [2])], 4.0, 0.0), [])
    compared.predicted.add(["256 px", "1024 px"], [1.0, 3.0], {1: 2}, 2.5)
    result = compared.result("degree 2")
    assert (result["degree_2_mean_s"], result["degree_2_predicted_mean_s"]) == (2.5, 2.0)
    assert result["degree_2_mean_off"] == pytest.approx(0.25)
    assert result["degree_2_p99_off"] == pytest.approx(1 / 3)
    assert result["degree_2_primed"] == 2
    assert "mean +25.0%, P99 +33.3%" in dict(compared.rows("degree 2")).values()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_system_has_all_ranks(num_ranks: int) -> None:
    for system in systems(num_ranks).values():
        assert system.num_engines * system.ranks_per_engine == num_ranks
        assert system.degree <= system.ranks_per_engine


def test_an_edit_that_fails_ends_the_measurement() -> None:
    with pytest.raises(RuntimeError, match="256 px failed: refused"):
        Comparison().add(["256 px"], Run([outcome(1.0, [], "refused")], 1.0, 0.0), [])


def test_the_default_policy_is_measured_against_the_best_fixed_degree_and_the_former_one() -> None:
    seconds = {OURS: 2.0, FORMER: 2.5, "degree 1": 4.0, "degree 2": 8.0}
    compared = {name: Comparison(measured=Served({"256 px": [of]})) for name, of in seconds.items()}
    assert list(against_others(compared)) == [("best fixed degree", 0.5, 0.5), (FORMER, 0.8, 0.8)]
    assert list(against_others({OURS: compared[OURS]})) == []
