"""The sweep's folder of results, and the document that is written from it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from benchmarks.baselines.diffusers_server import server_config
from benchmarks.baselines.systems import SYSTEMS, Setting
from benchmarks.benchmark_serving import as_json
from benchmarks.evidence.document import MEASURING, write_document
from benchmarks.evidence.fleet import Fleet
from benchmarks.evidence.markdown import fill
from benchmarks.evidence.plan import SHORT
from benchmarks.evidence.results import Result, Results
from benchmarks.evidence.serving_part import ServingPart
from benchmarks.evidence.steps_part import Way, ways
from benchmarks.load.client import Outcome, Run, Target
from benchmarks.load.server import ROOT
from benchmarks.load.summary import Context, summarise
from benchmarks.micro import overheads

PAGE = """# Title

Prose.

## Speed

Of {device[name]}:

| what | ms | share |
| --- | --- | --- |
speeds: | {name} at {ratio:g} | {ms:.1f} | {share:.2f} |
speeds: | launched | {launch_ms:.1f} | |

## Left out

{missing}
"""


def test_a_page_is_prose_with_its_figures_and_a_row_per_record() -> None:
    records = [{"name": "a", "ratio": 0.1, "ms": 2.0, "share": None}, {"name": "b", "ratio": 0.2, "launch_ms": 3.0}]
    page = fill(PAGE, {"device": {"name": "a {brace}"}, "speeds": records})
    assert page.splitlines()[4:] == [
        "## Speed",
        "",
        "Of a {brace}:",
        "",
        "| what | ms | share |",
        "| --- | --- | --- |",
        "| a at 0.1 | 2.0 |  |",
        "| launched | 3.0 |  |",
    ], "a cell without its figure is empty; a row without figures and a section without values are left out"
    assert fill(PAGE, {}) == "# Title\n\nProse.\n"


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


def test_what_is_there_is_not_measured_again(results: Results) -> None:
    assert results.get_or_make("part/one", lambda: {"value": 1})["value"] == 1
    assert results.get_or_make("part/one", lambda: {"value": 2})["value"] == 1
    results.drop("part")
    assert results.get_or_make("part/one", lambda: {"value": 2})["value"] == 2
    assert [result["value"] for result in results.all("part/")] == [2]


def run(system: str, throughput: float, load: float, rate: float) -> Result:
    outcomes = [Outcome(0.0, 0.0, 10 / throughput, None, "", {"ms": {"queue": 5.0, "denoise": 50.0}})] * 10
    summary = summarise(
        Run(outcomes, 10 / throughput, 0.1),
        Context(worker_seconds={"prime": 2 / throughput, "denoise": 6 / throughput}, request_rate=rate),
    )
    return {"system": system, "load": load, "seed": 0} | as_json(summary)


def test_the_document_says_what_the_files_say(results: Results, tmp_path: Path) -> None:
    for system in SYSTEMS:
        rate = 4.0 if system == "stencil" else 2.0
        results.put(f"serving/throughput-public-8-{system}", run(system, rate, 1.0, 1.0))
    for system in ("diffusers", "stencil"):
        results.put(f"serving/headline-0-{system}", run(system, 3.0, 0.95, 1.9))
    results.put("serving/keep-up-1.6-stencil", run("stencil", 3.0, 1.6, 2.5))
    folder = tmp_path / "docs"
    folder.mkdir()
    write_document(results, folder)
    text = (folder / "benchmarks.md").read_text()
    assert "| Stencil | 4.00 | 2.00x | 5.00 |" in text
    assert "| Stencil | 10 | 1.25 | 2.50 | 3.00 |" in text
    assert "Mean latency 1.0x lower." in text
    assert "| prime | 50.0 |" in text
    assert "| **worker, all** | **200.0** |" in text
    assert "## Quality" not in text  # nothing was measured
    assert text.endswith(MEASURING.read_text())


def found(family: str, ssim: float, seconds: float, **facts: object) -> Result:
    """A way, as `benchmarks.quality step-skipping` reports it."""
    kinds = {"computed": None, "first_block_cache": None, "num_inference_steps": None}
    return {"family": family, "steps": 9.0, "ssim_mean": ssim, "ssim_p10": 0.9, "seconds": seconds} | kinds | facts


LINE: Result = {
    "num_edits": 12,
    "calibrated": [0, 1, 3],
    "ways": [
        found("diffusers, schedule", 1.0, 1.4),
        found("diffusers, schedule", 0.99, 0.6, computed=[0, 1, 3]),
        found("diffusers, schedule", 0.97, 0.4, computed=[0, 3]),
        found("diffusers, first-block cache", 0.99, 0.9, first_block_cache=0.1),
        found("diffusers, first-block cache", 0.98, 0.8, first_block_cache=0.2),
        found("diffusers, first-block cache", 0.97, 0.7, first_block_cache=0.3),
        found("diffusers, fewer steps", 0.98, 0.5, num_inference_steps=5),
        found("Stencil, schedule", 0.985, 0.4),
        found("Stencil, schedule", 0.98, 0.2, computed=[0, 1, 3]),
    ],
}


def test_diffusers_is_served_in_its_fastest_ways_of_equal_ssim() -> None:
    served: dict[str, Way] = {way.label: way for way in ways(LINE)}
    assert {label.removeprefix("diffusers, "): way.fields for label, way in served.items() if "batch" not in label} == {
        "all steps, one at a time": {},
        "the same noise levels, one at a time": {"computed_steps": [0, 1, 3]},
        "first-block cache 0.2, one at a time": {"first_block_cache": 0.2},
        "5 even steps, one at a time": {"num_inference_steps": 5},
        "Stencil": {},
        "Stencil, calibrated schedule": {"step_schedule": "calibrated"},
    }
    assert {way.system for way in served.values()} == {"diffusers", "diffusers-batch", "stencil"}
    assert len({way.name for way in served.values()}) == len(served) == 10


def test_the_document_names_the_fastest_diffusers_of_equal_ssim(results: Results, tmp_path: Path) -> None:
    results.put("steps/quality", {"lines": [LINE]})
    for number in range(2):
        for way in ways(LINE):
            rate = {"stencil": 2.0, "stencil-calibrated": 4.0, "diffusers-batch-5-even-steps": 1.25}.get(way.name, 1.0)
            facts = {"way": way.name, "label": way.label, **way.facts}
            slower = rate / (1 + number)  # of a machine that slows down, ratios are the same
            results.put(f"steps/round-{number}-{way.name}", facts | run(way.system, slower, 1.0, 1.0))
    write_document(results, tmp_path)
    text = (tmp_path / "benchmarks.md").read_text()
    assert "| diffusers, all steps, one at a time | 9.0 | 0.75 | 4.00x | 1.0000 / 0.9000 |  | 0 |" in text
    assert "| Stencil | 9.0 | 1.50 | 2.00x | 0.9850 / 0.9000 |" in text
    assert "3.20x the edits of the fastest diffusers system of equal or" in text
    assert "(diffusers, 5 even steps, static batches of 8), and 4.00x those of diffusers with the same" in text


class CountingServer(ThreadingHTTPServer):
    """Answers every edit at once, and counts them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.num_edits = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: CountingServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        with self.server.lock:
            self.server.num_edits += 1
        self._answer(json.dumps({"data": [{"b64_json": "eA=="}]}).encode())

    def do_GET(self) -> None:
        self._answer(b"")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Not to stderr."""


@pytest.fixture
def counting() -> Iterator[CountingServer]:
    with CountingServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_every_system_gets_the_same_warm_ups(results: Results, counting: CountingServer) -> None:
    class OneServer(Fleet):
        def target(self, name: str) -> Target:
            return Target(counting.url)

    part = ServingPart(
        OneServer(Setting("any")), replace(SHORT, warm_ups=3, throughput_edits=2, aware_share=2), results
    )
    sent = {}
    for name in SYSTEMS:
        counting.num_edits = 0
        part._throughput(name, "public", SHORT.steps)
        sent[name] = counting.num_edits
    assert sent == {name: 3 + (4 if system.is_mask_aware else 2) for name, system in SYSTEMS.items()}


def test_baselines_keep_connections_longer_than_clients() -> None:
    """Or a request is lost that is sent while the server closes."""
    kept = httpx.Limits().keepalive_expiry
    assert kept is not None
    assert server_config(FastAPI(), 0).timeout_keep_alive > 2 * kept


def test_every_part_has_its_section(results: Results, tmp_path: Path) -> None:
    edit = {"exact_s": 0.4, "warm_s": 0.2, "cold_s": 0.3, "exact_denoise_s": 0.3, "warm_speedup": 2.0}
    results.put("mask-ratio/edit", {"lines": [edit | {"mask_ratio": ratio} for ratio in (0.1, 0.5)]})
    fleet = {"offered": 2.5, "utilization": 0.9, "p95": 8.0}
    for scenario, mean in (("one-at-a-time", 6.0), ("same-rate", 0.5)):
        results.put(f"fleet/{scenario}", {"lines": [fleet | {"scenario": scenario, "mean": mean}]})
    figures = ("ssim_box_mean", "ssim_box_p10", "psnr_box_mean_db", "ssim_whole_mean")
    figures += ("colour", "pattern", "outside_error_mean")
    system = {"num_edits": 25} | dict.fromkeys(figures, 0.5)
    quality = {"masks": "box", "steps": 8, "num_edits": 100, "first_block_cache": 0.4, "systems": {"Stencil": system}}
    results.put("quality", {"lines": [quality]})
    for name in ("large/diffusers", "large/stencil"):
        results.put(name, run(name.partition("/")[2], 2.0, 1.0, 1.0))
    folder = tmp_path / "docs"
    folder.mkdir()
    write_document(results, folder)
    text = (folder / "benchmarks.md").read_text()
    for row in (
        "| 0.10 | 400 | 200 | 300 | 2.00x |",
        "| Stencil (25) | 0.5000 / 0.5000 |",
        "Mean latency 12.0x lower.",
    ):
        assert row in text


def test_overheads_are_those_of_full_batches(capsys: pytest.CaptureFixture[str]) -> None:
    overheads.main(["--steps", "20", "--repeats", "5"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    parts = [result[f"{name}_ms"] for name in ("step_batch_8", "copy_picture", "ring_hop", "zmq_hop")]
    assert min(parts) > 0
    assert result["handover_ms"] >= result["copy_picture_ms"]


def test_a_server_ends_with_whoever_started_it() -> None:
    script = (
        "import subprocess, sys, os, signal\n"
        "from benchmarks.load.server import end_with_parent\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], preexec_fn=end_with_parent)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, cwd=ROOT, stdout=subprocess.PIPE)
    status = Path(f"/proc/{int(done.stdout)}/status")
    for _ in range(2000):
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        subprocess.run(["sleep", "0.01"], check=True)
    raise AssertionError("it is still there")
