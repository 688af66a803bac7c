"""Predictions of a mix, with costs that are known: every edit with its kind's, on the engine that it was given."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import msgspec
import pytest
from fakes import MODEL, make_edit, with_spec
from known_costs import AROUND, SECONDS, TWO_RANKS, known

from benchmarks.load.client import Outcome, Run
from benchmarks.serving.lone_run import LoneRun
from benchmarks.serving.mix_prediction import Alone, Round, System, predict
from benchmarks.serving.recorded import FORMER_ELASTIC, Arrival, Batch, Recorded
from benchmarks.simulation.outside import Surroundings
from core.messages.codec import encode
from core.scheduling.policies import policy_class

STEPS = 4
WORK = sum(SECONDS.values()) + (STEPS - 1) * SECONDS["denoise"]
"""Seconds of an edit's batches."""
LARGE = replace(AROUND, prepare=3.0, deliver=2.0)
ONE_RANK = System("default", 1, 1)


def arrival(seed: int, now: float = 1.0, engine: int = 7) -> Arrival:
    edit = make_edit(f"of seed {seed}", steps=STEPS)
    edit = with_spec(edit, sampling=msgspec.structs.replace(edit.spec.sampling, seed=seed))
    head = encode(msgspec.structs.replace(edit, model=MODEL.name))
    return Arrival(base64.b64encode(head).decode(), now, engine)


def edits(kinds: Sequence[str], engines: Sequence[int], due: Sequence[float]) -> Round:
    """Of a run in which they have reached their engines in reverse."""
    arrivals = [arrival(seed, 10.0 - seed, engine) for seed, engine in enumerate(engines)]
    outcomes = [Outcome(when, when, when, None, "", {}) for when in due]
    return Round.of(Run(outcomes, 9.0, 0.0, started=5.0), [arrival(3, 1.0), *reversed(arrivals)], kinds, due)


@pytest.fixture
def alone() -> Alone:
    """Batches that take twice what is known."""
    return Alone(1, {"small": lone(AROUND), "large": lone(LARGE)}, [])


def lone(around: Surroundings) -> LoneRun:
    ops = ["text_encode", "image_encode", *["denoise"] * STEPS, "decode"]
    ends = list(accumulate((2 * SECONDS[op] for op in ops), initial=around.prepare))
    batches = [
        Batch(0, op, ("of seed 0",), 0.0, start, end - start, 1, 0.0, 0.0)
        for op, start, end in zip(ops, ends, ends[1:], strict=False)
    ]
    outcome = Outcome(0.0, 0.0, ends[-1] + around.deliver, None, "", {"ms": {"preprocess": 0.0}})
    return LoneRun(Run([outcome], 9.0, 0.0, 0.0), [arrival(0, around.prepare)], batches, around.outside_cpu)


def test_edits_of_a_run_are_in_their_order_without_the_warm_ups() -> None:
    found = edits(["small"] * 3, [7, 7, 7], [0.0, 1.0, 2.0])
    assert [each.request.spec.sampling.seed for each in found.arrivals] == [0, 1, 2]
    assert [each.request.spec.sampling.seed for each in found.warm_ups] == [3]


@pytest.mark.parametrize("policy", ["default", FORMER_ELASTIC])
def test_each_kind_has_its_own_costs_beside_its_batches(alone: Alone, policy: str) -> None:
    found = predict(known(), alone, System(policy, 1, 1), edits(["small", "large"], [7, 7], [0.0, 50.0]), {})
    expected = [WORK + around.prepare + around.deliver for around in (AROUND, LARGE)]
    assert found.latencies == pytest.approx(expected, rel=0.05)
    assert found.worker_seconds == pytest.approx(2 * WORK, rel=0.05)


def test_steps_of_a_fixed_degree_are_shared(alone: Alone) -> None:
    systems = [System("default", 1, 2, degree) for degree in (1, 2)]
    one, two = (predict(known(), alone, system, edits(["small"], [7], [0.0]), {}) for system in systems)
    assert (one.num_steps, two.num_steps) == ({1: STEPS}, {2: STEPS})
    saved = (1 - TWO_RANKS) * STEPS * SECONDS["denoise"]
    assert one.latencies[0] - two.latencies[0] == pytest.approx(saved, rel=0.1)


def test_edits_wait_for_those_of_their_own_engine_alone(alone: Alone) -> None:
    system = System("default", 2, 1)
    kinds, due = ["small"] * 2, [0.0, 0.0]
    apart, together = (predict(known(), alone, system, edits(kinds, engines, due), {}) for engines in ([7, 8], [7, 7]))
    assert apart.latencies[0] == pytest.approx(apart.latencies[1])
    # Steps are not shared, since a shared one takes as long as two: the second edit waits for the first.
    assert max(together.latencies) > 1.8 * max(apart.latencies)
    # Where ranks share a core with other processes, the first one's delivery delays the second.
    assert together.worker_seconds == pytest.approx(apart.worker_seconds, rel=0.2)


def test_batches_take_what_they_took_alone(alone: Alone) -> None:
    stretch = alone.stretch(known())
    assert stretch == pytest.approx({(op, 1): 2.0 for op in SECONDS}, rel=0.05)
    run = edits(["small"], [7], [0.0])
    plain, stretched = (predict(known(), alone, ONE_RANK, run, each) for each in ({}, stretch))
    assert stretched.latencies[0] - plain.latencies[0] == pytest.approx(WORK, rel=0.05)


@pytest.mark.parametrize("kind", Recorded.__subclasses__(), ids=lambda kind: kind.inner)
def test_a_policy_is_recorded_as_what_it_is(kind: type[Recorded]) -> None:
    assert kind.spreads_models == policy_class(kind.inner).spreads_models
