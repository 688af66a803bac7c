"""Figures of a run whose outcomes are known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.benchmark_serving import as_json, main, rows
from benchmarks.load.client import Outcome, Run, Target, WarmUpError
from benchmarks.load.dataset import EditCall, Mix, synthetic
from benchmarks.load.lone import LONE_EDITS, LoneLatency, measure_lone
from benchmarks.load.summary import Context, summarise
from benchmarks.report import print_report

FACTS = {"mask_ratio": 0.25, "cache": "hit", "ms": {"queue": 100.0}}


def outcome(
    due: float, latency: float, error: str = "", facts: dict[str, Any] | None = None, slo_ms: float | None = None
) -> Outcome:
    facts = FACTS if facts is None else facts
    return Outcome(due, due + 0.001, due + latency, due + latency / 2, error, facts, slo_ms)


def edits(number: int) -> list[EditCall]:
    return synthetic(Mix(sizes="64x64"), number, np.random.default_rng(0))


def test_rates_latencies_and_slos() -> None:
    outcomes = [outcome(float(i), 0.5 if i < 8 else 2.0, slo_ms=1000.0 + i) for i in range(10)]
    context = Context(request_rate=1.0, areas=(0.1, 0.2), worker_seconds={"all": 4.0}, wants_first_image=True)
    summary = summarise(Run(outcomes, seconds=11.0, cpu_seconds=0.02), context)
    assert summary.throughput == pytest.approx(10 / 11)
    assert summary.goodput == pytest.approx(8 / 11)
    assert summary.slo_attainment == pytest.approx(0.8)
    assert summary.slo_ms == pytest.approx(1004.5)
    assert summary.keeps_up is False  # 0.91 of the offered rate
    assert summary.latency is not None
    assert summary.latency.mean == pytest.approx(800)
    assert summary.latency.median == pytest.approx(500)
    assert dict(summary.latency.percentiles)[95.0] == pytest.approx(2000)
    assert summary.queue is not None
    assert summary.queue.mean == pytest.approx(100)
    assert summary.first_image is not None
    assert summary.first_image.median == pytest.approx(250)
    assert (summary.mask_area, summary.mask_ratio, summary.hit_ratio) == (pytest.approx(0.15), 0.25, 1.0)
    assert summary.client_late_ms == pytest.approx(1.0)
    assert summary.client_cpu_ms == pytest.approx(2.0)


def test_a_failed_edit_has_no_end_and_misses_its_slo() -> None:
    outcomes = [outcome(0.0, 0.5, slo_ms=1000), outcome(0.1, 0.5, "status 503: no", slo_ms=1000)]
    summary = summarise(Run(outcomes, seconds=1.0, cpu_seconds=0.0), Context(request_rate=0.5))
    assert (summary.num_failed, summary.throughput, summary.slo_attainment) == (1, 1.0, 0.5)
    assert summary.keeps_up is False
    assert summary.latency is not None
    assert summary.latency.mean is None
    assert summary.latency.percentiles[-1][1] is None
    assert summary.latency_completed_ms == pytest.approx(500)
    assert summary.errors == ("status 503: no",)


@pytest.mark.parametrize("latency", [0.5, 8.0])
def test_a_slow_answer_to_the_last_edit_is_no_backlog(latency: float) -> None:
    outcomes = [outcome(i + 1.0, latency) for i in range(10)]
    summary = summarise(Run(outcomes, seconds=10 + latency, cpu_seconds=0.0), Context(request_rate=1.0))
    assert summary.throughput == pytest.approx(10 / (10 + latency))
    assert summary.achieved == pytest.approx(1.0)
    assert summary.keeps_up is True


def test_a_growing_queue_is_one() -> None:
    outcomes = [outcome(i + 1.0, 8.0 + i / 4) for i in range(10)]
    summary = summarise(Run(outcomes, seconds=10 + 10.25, cpu_seconds=0.0), Context(request_rate=1.0))
    assert summary.achieved == pytest.approx(10 / 12.25)
    assert summary.keeps_up is False


def test_nothing_that_came_back_keeps_up_with_nothing() -> None:
    summary = summarise(Run([outcome(0.1, 0.5, "no")], 1.0, 0.0), Context(request_rate=1.0))
    assert (summary.achieved, summary.keeps_up) == (0.0, False)


def test_a_failed_edit_is_not_within_an_slo_without_end() -> None:
    outcomes = [outcome(0.0, 0.5, slo_ms=math.inf), outcome(0.1, 0.5, "status 503: no", slo_ms=math.inf)]
    assert summarise(Run(outcomes, 1.0, 0.0), Context()).slo_attainment == 0.5


def test_goodput_is_unknown_where_an_edit_has_no_slo() -> None:
    outcomes = [outcome(0.0, 0.5, slo_ms=1000), outcome(0.1, 0.5)]
    assert summarise(Run(outcomes, 1.0, 0.0), Context()).goodput is None


def test_slos_are_multiples_of_what_edits_take_alone_by_their_steps() -> None:
    calls = [replace(call, steps=steps) for call, steps in zip(edits(3), (10, 50, 10), strict=True)]
    calls[2] = replace(calls[2], slo_ms=7.0)
    scaled = LoneLatency(seconds=0.2, per_step=0.01).scaled(calls, 1.5)
    assert [call.slo_ms for call in scaled] == [pytest.approx(450), pytest.approx(1050), 7.0]


async def test_no_slo_is_scaled_from_edits_that_failed() -> None:
    with pytest.raises(WarmUpError, match=r"5 of 5 requests failed: ConnectError"):
        await measure_lone(Target("http://127.0.0.1:9"), edits(LONE_EDITS), [8])


def test_warm_ups_that_fail_end_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "1", "--num-warmups", "2", "--sizes", "64x64", "--disable-tqdm"]
    with pytest.raises(SystemExit) as left:
        main(["--base-url", "http://127.0.0.1:9", *flags])
    assert left.value.code == 1
    assert capsys.readouterr().err.startswith("error: 2 of 2 requests failed: ConnectError")


def test_what_a_server_does_not_tell_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [outcome(0.0, 0.5, facts={})]
    summary = summarise(Run(outcomes, seconds=1.0, cpu_seconds=0.0), Context(request_rate=math.inf))
    assert (summary.queue, summary.mask_ratio, summary.hit_ratio, summary.worker_seconds) == (None, None, None, None)
    assert (summary.goodput, summary.keeps_up, summary.first_image) == (None, None, None)
    print_report("title", rows(summary), as_json(summary))
    printed = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["queue", "time"] and line.endswith("n/a") for line in printed)
    result = json.loads(printed[-1])
    assert result["request_rate"] is None
    assert result["latency_p99_ms"] == pytest.approx(500)


def test_exact_edits_count_neither_as_hits_nor_as_misses() -> None:
    outcomes = [outcome(0.0, 0.1, facts={"cache": kind}) for kind in ("off", "hit", "miss", "off")]
    assert summarise(Run(outcomes, 1.0, 0.0), Context()).hit_ratio == 0.5
