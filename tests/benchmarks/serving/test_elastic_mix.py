"""The mix of large and small edits: drawn alike for every system, and judged by what all of them answer."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.load.client import Outcome, Run
from benchmarks.serving.elastic_mix import KINDS, Measured, draw


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
    return Outcome(0.0, 0.0, latency, None, error, {"degrees": degrees})


def test_steps_are_counted_by_degree_and_latencies_by_kind() -> None:
    measured = Measured()
    measured.add(["256 px", "1024 px"], Run([outcome(1.0, [1, 1]), outcome(3.0, [1, 2])], 4.0, 0.0))
    assert (measured.mean, measured.p99) == (2.0, 3.0)
    assert measured.degrees == {1: 3, 2: 1}
    assert measured.by_kind == {"256 px": [1.0], "1024 px": [3.0]}


def test_an_edit_that_fails_ends_the_measurement() -> None:
    with pytest.raises(RuntimeError, match="256 px failed: refused"):
        Measured().add(["256 px"], Run([outcome(1.0, [], "refused")], 1.0, 0.0))
