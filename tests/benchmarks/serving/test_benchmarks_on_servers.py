"""The serving benchmark and the baselines, on a small random checkpoint and real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import httpx
import numpy as np
import pytest

from benchmarks.baselines.systems import Setting, running
from benchmarks.benchmark_serving import main
from benchmarks.load.client import Target, connect, send_alone, send_in_turn, send_on_time, worker_seconds
from benchmarks.load.dataset import Mix, synthetic
from benchmarks.load.server import Server
from benchmarks.soak.checking import Ledger, References
from benchmarks.soak.edits import PLAIN, Delivery, Edit, Way, template_file
from benchmarks.soak.memory import Tree, holdings
from benchmarks.soak.sending import Sender
from tools.random_checkpoints import make_flux_fill

WAYS: tuple[Way, ...] = get_args(Way)
MIX = Mix("fixed:0.2", "fixed:2", num_inference_steps="2", sizes="64x64")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_flux_fill(tmp_path_factory.mktemp("model") / "flux"))


@pytest.fixture(scope="module")
def stencil(checkpoint: str) -> Iterator[Server]:
    with running("stencil", Setting(checkpoint)) as server:
        yield server


@pytest.fixture(scope="module")
def diffusers(checkpoint: str) -> Iterator[Server]:
    with running("diffusers-batch", Setting(checkpoint)) as server:
        yield server


def test_the_command_measures_a_server(stencil: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "6", "--request-rate", "40", "--num-inference-steps", "2", "--sizes", "64x64"]
    flags += ["--num-warmups", "2", "--slo-scale", "1000", "--partial-images", "1", "--disable-tqdm"]
    flags += ["--save-result", "--result-dir", str(tmp_path), "--mask-ratio-dist", "fixed:0.1"]
    main(["--base-url", stencil.url, *flags])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["num_failed"], result["errors"]) == (0, [])
    assert result["slo_attainment"] == 1.0
    assert 0 < result["first_image_median_ms"] <= result["latency_median_ms"]
    assert result["queue_mean_ms"] > 0
    assert min(result["worker_seconds"][stage] for stage in ("text_encode", "image_encode", "denoise", "decode")) > 0
    assert 0.1 < result["mask_ratio"] < 1
    (saved,) = tmp_path.glob("*.json")
    assert json.loads(saved.read_text())["num_edits"] == 6


def test_the_soak_finds_all_processes_of_a_server(stencil: Server) -> None:
    tree = Tree(stencil.process.pid, 1)
    assert {(member.role, member.engine) for member in tree.members()} >= {("server", 0), ("engine", 0), ("images", 0)}
    (worker,) = tree.of("worker", 0)
    assert tree.of("worker") == [worker]
    (memory,) = holdings(tree).workers
    assert (memory.pid, memory.memory > 0) == (worker.process.pid, True)


async def test_the_server_is_told_the_slo_of_an_edit(stencil: Server) -> None:
    (call,) = (replace(call, slo_ms=1.0) for call in synthetic(MIX, 1, np.random.default_rng(0)))
    for target, is_failed in ((Target(stencil.url, sends_slo=True), True), (Target(stencil.url), False)):
        (outcome,) = (await send_on_time(target, [call], [0.0])).outcomes
        assert outcome.is_failed is is_failed
        assert outcome.refusal is None or outcome.refusal.status == 504


async def test_failures_are_counted_and_not_raised(stencil: Server) -> None:
    calls = synthetic(MIX, 2, np.random.default_rng(0))
    run = await send_on_time(Target(stencil.url, extra={"num_inference_steps": -1}), calls, [0.0, 0.0])
    assert [outcome.is_failed for outcome in run.outcomes] == [True, True]
    assert all("status 400" in outcome.error for outcome in run.outcomes)
    run = await send_on_time(Target("http://127.0.0.1:9"), calls, [0.0, 0.0])
    assert all("ConnectError" in outcome.error for outcome in run.outcomes)


async def test_a_refusal_says_its_status_and_code(stencil: Server) -> None:
    (call,) = synthetic(MIX, 1, np.random.default_rng(0))
    target = Target(stencil.url, model="no-such-model")
    async with connect(target) as http:
        outcome = await send_alone(http, target, call)
    assert outcome.refusal is not None
    assert (outcome.refusal.status, outcome.refusal.code, outcome.refusal.retry_after) == (404, "model_not_found", None)


async def test_clients_go_round_until_the_time_is_over(stencil: Server) -> None:
    calls = synthetic(MIX, 2, np.random.default_rng(0))
    run = await send_in_turn(Target(stencil.url), calls, 2, seconds=2.0)
    assert len(run.outcomes) > 2
    assert not any(outcome.is_failed for outcome in run.outcomes)
    assert max(outcome.sent for outcome in run.outcomes) < 2.1


async def test_an_edit_of_the_soak_is_the_same_however_it_travels(stencil: Server, tmp_path: Path) -> None:
    ledger, edit = Ledger(tmp_path), Edit("some", 1, "disc", "a hat", 5, 2, n=2)
    sender, references = Sender(stencil.url, ledger), References(ledger)
    upload = {"image": ("image.png", template_file(1), "image/png")}
    template_id = (await sender.call("POST", "/v1/templates", files=upload)).json()["id"]
    references.learn(edit, PLAIN, await sender.send(edit, PLAIN))
    ways = [
        Delivery(way, is_by_id, is_white) for way in WAYS for is_by_id in (False, True) for is_white in (False, True)
    ]
    for delivery in ways:
        references.judge(edit, delivery, await sender.send(edit, delivery, template_id if delivery.by_id else None))
    generation = Edit("made", None, "all", "a hat", 5, 2, extras=(("size", "64x64"),))
    assert len((await sender.send(generation, Delivery("stream"))).pictures) == 1
    await sender.aclose()
    assert ledger.counts["compared"] == 2 * len(ways)
    assert (ledger.counts["lost"], ledger.counts["wrong"], ledger.counts["rounded"]) == (0, 0, 0)


async def test_latency_counts_from_the_due_time(stencil: Server) -> None:
    calls = synthetic(MIX, 3, np.random.default_rng(0))
    run = await send_on_time(Target(stencil.url), calls, [0.0, 0.0, 0.0], max_concurrency=1)
    ends = sorted(outcome.done for outcome in run.outcomes)
    assert max(outcome.latency for outcome in run.outcomes) == pytest.approx(ends[-1])


@pytest.mark.parametrize("fields", [{}, {"first_block_cache": 0.5}, {"computed_steps": [0]}], ids=str)
async def test_diffusers_batches_statically_and_leaves_out_steps(diffusers: Server, fields: dict[str, object]) -> None:
    calls = synthetic(MIX, 5, np.random.default_rng(0))
    target = Target(diffusers.url, extra=fields)
    run = await send_in_turn(target, calls, 5)
    assert [outcome.error for outcome in run.outcomes] == [""] * 5
    assert all(outcome.facts["ms"]["queue"] >= 0 for outcome in run.outcomes)
    assert (await worker_seconds(target) or {})["all"] > 0


def test_a_baseline_refuses_what_it_cannot_read(diffusers: Server) -> None:
    (call,) = synthetic(MIX, 1, np.random.default_rng(0))
    files = {"image": call.image, "mask": call.mask}
    for data in ({"prompt": "a"}, {"prompt": "a", "computed_steps": "0 1"}, {"prompt": "a", "first_block_cache": "x"}):
        given = files if len(data) > 1 else {}
        assert httpx.post(f"{diffusers.url}/v1/images/edits", data=data, files=given).status_code == 400
