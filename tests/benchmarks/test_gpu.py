"""The check of a GPU machine, run on a CPU at a tiny size: a machine with a GPU must lose no time on slips."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType

from benchmarks.gpu import correctness, flux, sections
from benchmarks.gpu.bars import Bar, bars
from benchmarks.gpu.bench import Bench, rotating
from benchmarks.gpu.boxes import box_at, box_tokens, middle_box
from benchmarks.gpu.correctness import difference, files_of_tests
from benchmarks.gpu.document import SECTIONS, all_results, render, results_file
from benchmarks.gpu.flux import FluxBench
from benchmarks.gpu.flux_runs import exact_run, resident_run
from benchmarks.gpu.flux_sections import ways_of
from benchmarks.gpu.graphs import GraphChoice, GraphSwitch
from benchmarks.gpu.overlap import device_spans, hidden_share, merged
from benchmarks.gpu.report import Report, read
from benchmarks.gpu.sdxl import Sdxl
from benchmarks.gpu.sections import Section
from benchmarks.gpu.sizes import FULL, TINY
from benchmarks.gpu.trace import Work, by_kernel, work_of
from benchmarks.load.server import ROOT
from model_executor.kernels.gpu_operators import GpuOperators

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The whole of it, at the tiny size."""
    folder = tmp_path_factory.mktemp("gpu-run")
    return check(RENDERING, folder), folder


RENDERING = """
from benchmarks.gpu import document, report
put = report.Report.put
def put_and_render(self, *args, **figures):
    put(self, *args, **figures)
    document.render([report.read(self._path)])
report.Report.put = put_and_render
"""
"""Whatever a run has when it is cut off can be written up."""


def check(before: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A run of the program in a process where this was run before."""
    program = f"import sys\n{before}\nfrom benchmarks.gpu.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    arguments = ["--device", "cpu", "--size", "tiny", "--minutes", "9", "--out", str(folder), *options]
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=600)


def results_in(folder: Path) -> dict[str, Any]:
    (results,) = all_results(folder)
    return results


@pytest.mark.slow  # see `make test-slow`
def test_every_section_runs_without_a_gpu(ran: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    process, folder = ran
    assert process.returncode == 0, process.stderr[-3000:]
    sections = results_in(folder)["sections"]
    assert not {"broken", "without_graphs", "skipped"} & sections.keys()
    assert sections.keys() - {"seconds"} == SECTIONS.keys()
    assert sections["served"]["second_edit"] == "hit, host"
    assert sections["kernel_tests"]["passed"], sections["kernel_tests"]["said"]
    assert sections["flux_steps"]["exact_from_diffusers"] < 1e-5
    assert sections["flux_steps"]["masked_from_exact"] < 0.02
    assert all(batch["diffusers_compiled_ms"] > 0 for batch in sections["flux_steps"]["batches"].values())
    for family in sections["family_steps"]["families"].values():
        assert family["exact_from_diffusers"] < 1e-5
        assert family["masked_from_exact"] < 0.02
        assert family["ratios"].keys() == {"0.1", "0.2"}
    launches = [step["launches"] for model in ("flux", "sdxl") for step in sections["kernel_times"][model].values()]
    assert min(launches) > 100
    alike = sections["correctness"]["checkpoints"]["flux_fill"]["float32"]
    same = {"max_levels": 0, "mean_levels": 0.0, "share_within_1": 1.0}
    assert alike == {"exact": same, "mask-aware": same}, "it is the same CPU"


@pytest.mark.slow  # see `make test-slow`
def test_a_later_edit_through_the_engine_finds_the_pages_of_the_first(
    ran: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    """Else it would be timed as one."""
    edits = results_in(ran[1])["sections"]["engine_edits"]
    assert edits["ops"]["cold"]["prime"]["batches"] == 1
    assert "prime" not in edits["ops"]["warm"]
    assert {edits["ops"][name]["denoise"]["batches"] for name in ("exact", "warm", "cold")} == {edits["steps"]}
    assert min(edits["exact_s"], edits["warm_s"], edits["cold_s"]) > 0


@pytest.mark.slow  # see `make test-slow`
def test_an_edit_of_sdxl_is_its_steps_and_the_vae(ran: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    sdxl = results_in(ran[1])["sections"]["sdxl"]
    vae_s = (sdxl["encode_ms"] + sdxl["decode_box_ms"]) / 1e3
    assert sdxl["masked_edit_s"] == pytest.approx(sdxl["masked_run_s"] + vae_s, rel=1e-4)


@pytest.mark.slow  # see `make test-slow`
def test_a_line_for_every_bar_and_the_document(ran: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    process, folder = ran
    results = results_in(folder)
    for bar in bars(results["sections"]):
        assert bar.line in process.stdout.splitlines()
    document = (folder / "gpu.md").read_text()
    assert document == render([results])
    assert "Nothing on this page has run on a GPU" in document
    assert "these figures show that the run works, and nothing else" in document
    assert "### A step of FLUX's transformer" in document


def test_the_document_in_the_repository_is_of_the_results_there() -> None:
    assert (ROOT / "docs" / "gpu.md").read_text() == render(all_results(ROOT / "docs"))


def test_every_card_has_a_file_and_a_column() -> None:
    assert results_file(Path("docs"), "NVIDIA H100 80GB HBM3") == Path("docs/gpu_results/nvidia-h100-80gb-hbm3.json")
    about = {
        "device_type": "cuda",
        "memory_gb": 80.0,
        "cuda": "13.0",
        "size": "full",
        "versions": {},
        "day": "2026-11-26",
    }
    cards = [{"about": about | {"device": name, "seconds": 1.0}, "sections": full_sections()} for name in "AB"]
    del cards[1]["sections"]["overhead"]
    cards[1]["sections"]["skipped"] = {"sdxl": "what is missing was cut off after 9 s"}
    document = render(cards)
    assert "|  | target | A | B |" in document
    assert "| a step of 8 edits up to its first kernel, ms | at most 1 | 0.9: pass | not run |" in document
    assert "| `overhead` | what comes before a step's first kernel | yes | no |" in document
    assert "| `sdxl` | steps and edits of SDXL | yes | in part |" in document
    assert "## A\n" in document
    assert "## B\n" in document


def full_sections() -> dict[str, Any]:
    """A run in which every bar is passed by little."""
    ratios = {
        "0.1": {"ms": 60.0, "graph_ms": 50.0, "bound": 5.0},
        "0.2": {"ms": 70.0, "graph_ms": 63.0, "bound": 3.46},
    }
    way = {"max_levels": 2, "mean_levels": 0.9, "share_within_1": 0.9995}
    checkpoint = {dtype: {"exact": way, "mask-aware": way} for dtype in ("float32", "bfloat16")}
    batch = {"diffusers_ms": 210.0, "exact_ms": 190.0, "exact_tflops": 650.0, "launch_ms": 14.0}
    graphs = {"captures": 4, "replays": 30, "failed": 0, "capture_ms": 80.0, "pool_gb": 1.9}
    mixed = {"diffusers_ms": 840.0, "mixed": {"ms": 160.0, "bound": 5.3}, "ratios": {}}
    flux = {"exact": 790, "masked": 550, "masked, batch of 8": 690}
    return {
        "correctness": {"checkpoints": {"embedded": checkpoint, "flux": checkpoint}},
        "flux_steps": {
            "billion_parameters": 11.9,
            "image_tokens": 4096,
            "text_tokens": 512,
            "exact_tflop": 125.0,
            "exact_from_diffusers": 0.01,
            "masked_from_exact": 0.02,
            "entry_gb": 1.48,
            "operators": "triton 3.6.0",
            "graphs": graphs,
            "batches": {
                "1": batch | {"diffusers_compiled_ms": 195.0, "ratios": ratios, "exact_graph_ms": 191.0},
                "8": batch | mixed | {"diffusers_compiled_ms": 780.0},
            },
        },
        "family_steps": {
            "families": {
                "FLUX.2-klein-4B": {
                    "billion_parameters": 3.9,
                    "image_tokens": 8192,
                    "text_tokens": 512,
                    "exact_from_diffusers": 0.01,
                    "masked_from_exact": 0.02,
                    "diffusers_ms": 120.0,
                    "exact_ms": 100.0,
                    "ratios": {"0.1": {"ms": 25.0, "graph_ms": 20.0, "bound": 10.0}, "0.2": {"ms": 30.0, "bound": 6.0}},
                }
            }
        },
        "flux_cold": {
            "keyframes": 5,
            "prime_ms": 900.0,
            "exact_step_ms": 190.0,
            "ratio": 0.1,
            "steps": 28,
            "warm_ratio": 0.2,
            "warm_edit_s": 2.1,
            "cold_edit_s": 2.3,
            "exact_edit_s": 5.4,
            "cold_bound": 0.38,
        },
        "offload": {
            "steps": 8,
            "differing": 0,
            "edit_s": 2.0,
            "offload_edit_s": 2.4,
            "peak_gb": 35.0,
            "offload_peak_gb": 33.0,
            "offload_text_encoder_gb": 9.4,
            "offload_text_encoder_ms": 190.0,
            "offload_vae_gb": 0.2,
            "offload_vae_ms": 4.0,
        },
        "engine_edits": {
            "steps": 28,
            "warm_ratio": 0.2,
            "cold_ratio": 0.1,
            "exact_s": 5.5,
            "warm_s": 2.6,
            "warm_graph_s": 2.1,
            "cold_s": 2.45,
            "graphs": graphs | {"pool_gb": 0.5},
        },
        "flux_host_pages": {
            "steps": 28,
            "ratio": 0.2,
            "copied_gb": 7.4,
            "seen_by": "profiler",
            "device_edit_s": 1.9,
            "host_edit_s": 2.0,
            "hidden_share": 0.95,
            "copy_ms": 150.0,
        },
        "kernel_times": {
            "flux": {
                name: {"launches": number, "fills": 5, "device_ms": 30.0, "kernels": []}
                for name, number in flux.items()
            },
            "sdxl": {"masked": {"launches": 1900, "fills": 3, "device_ms": 25.0, "kernels": [KERNEL]}},
        },
        "kernel_tests": {"has_run": True, "passed": True, "said": "12 passed in 3.4s"},
        "served": {
            "ready_s": 9.0,
            "device_page_gb": 120.0,
            "second_edit": "hit, device",
            "max_levels": 1,
            "mean_levels": 0.01,
            "share_within_1": 1.0,
        },
        "overhead": {"schedule_ring_apply_ms": 0.4, "runner_ms": 0.5, "total_ms": 0.9},
        "attention": {"chosen": "alike", "ratio": 0.1, "steps": {"1": {"alike": 27.0, "together": 30.0}}},
        "sdxl": {
            "ratio": 0.2,
            "steps": 30,
            "bound": 2.16,
            "diffusers_ms": 60.0,
            "exact_ms": 60.0,
            "exact_graph_ms": 45.0,
            "masked_ms": 25.0,
            "diffusers_edit_s": 2.0,
            "masked_edit_s": 0.9,
        },
    }


KERNEL = {"name": "gemm", "calls": 7, "ms": 1.5}


def test_bars_pass_miss_or_were_not_run() -> None:
    assert [bar.verdict for bar in bars(full_sections())] == ["pass"] * len(bars({}))
    assert [bar.verdict for bar in bars({})] == ["not run"] * len(bars({}))
    for text in ("broken", "skipped"):
        some_broke = full_sections() | {text: {"correctness": "Traceback"}}
        assert [bar.verdict for bar in bars(some_broke)].count("not run") == 1
    for path, worse in (
        (("flux_steps", "batches", "1", "ratios", "0.1", "graph_ms"), 52.0),
        (("flux_steps", "batches", "8", "mixed", "ms"), 170.0),
        (("flux_steps", "graphs", "pool_gb"), 2.1),
        (("flux_host_pages", "hidden_share"), 0.5),
        (("flux_cold", "cold_edit_s"), 2.5),
        (("engine_edits", "cold_s"), 2.5),
        (("engine_edits", "warm_graph_s"), 2.3),
        (("kernel_times", "flux", "masked", "launches"), 561),
        (("kernel_times", "flux", "masked, batch of 8", "launches"), 701),
        (("kernel_times", "sdxl", "masked", "launches"), 1951),
        (("overhead", "total_ms"), 1.1),
        (("sdxl", "masked_edit_s"), 1.0),
        (("sdxl", "exact_graph_ms"), 47.0),
        (("offload", "differing"), 1),
    ):
        sections = full_sections()
        place = sections
        for name in path[:-1]:
            place = place[name]
        assert path[-1] in place
        place[path[-1]] = worse
        assert [bar.verdict for bar in bars(sections)].count("miss") == 1, path


def test_steps_without_graphs_are_judged_by_what_they_take_eagerly() -> None:
    sections = full_sections()
    for step in sections["flux_steps"]["batches"]["1"]["ratios"].values():
        del step["graph_ms"]
    measured = {bar.name: bar.measured for bar in bars(sections)}
    assert measured["FLUX step at ratio 0.2, x diffusers compiled"] == pytest.approx(195 / 70)
    assert measured["FLUX step at ratio 0.2, x our exact step"] == pytest.approx(190 / 70)


def test_a_bar_is_missed_by_what_is_no_number() -> None:
    assert Bar("x", 1.0, at_least=1.0).verdict == Bar("x", 1.0, at_most=1.0).verdict == "pass"
    assert Bar("x", nan, at_least=1.0).verdict == Bar("x", nan, at_most=1.0).verdict == "miss"


def test_a_gpus_results_are_written_up() -> None:
    about = {
        "device": "NVIDIA H200",
        "device_type": "cuda",
        "memory_gb": 150.0,
        "cuda": "13.0",
        "size": "full",
        "versions": {"torch": "2.13", "triton": "3.6", "diffusers": "0.42", "transformers": ""},
        "day": "2026-11-26",
        "seconds": 440.0,
    }
    texts = {"broken": {"sdxl": "Traceback: here"}, "without_graphs": {"flux_cold": "capture failed"}}
    document = render([{"about": about, "sections": full_sections() | texts}])
    for said in (
        "## NVIDIA H200\n",
        "150 GB, CUDA 13.0, torch 2.13, triton 3.6, diffusers 0.42; 2026-11-26, 440 s in all.",
        "| 1 | 210.0 | 195.0 | 190.0 (650 TFLOP/s) | 14.0 |  | 60.0: 3.25x (0.65) | 70.0: 2.79x (0.81) |  |",
        "| 1, as a CUDA graph |  |  | 191.0 |  |  | 50.0: 3.90x (0.78) | 63.0: 3.10x (0.89) |  |",
        "| 8 | 840.0 | 780.0 | 190.0 (650 TFLOP/s) | 14.0 |  |  |  | 160.0: 4.88x (0.92) |",
        "| FLUX.2-klein-4B | diffusers eager | 120.0 |  |  |  |  |  |",
        "| FLUX.2-klein-4B | ratio 0.1 | 25.0 | 20.0 | 6.00x | 5.00x | 10.00x | 0.50 |",
        "| FLUX.2-klein-4B | ratio 0.2 | 30.0 |  | 4.00x | 3.33x | 6.00x | 0.56 |",
        "4 captures of 80 ms each, 0 failed",
        "| later edit at mask ratio 0.2 | 2.10 s |",
        "| first edit at mask ratio 0.1 | 2.30 s: 0.43 of it, by operations of the denoiser 0.38 |",
        "| the same with CUDA graphs | 2.10 s: 2.62x |",
        "| copies under kernels | 0.95 of 150 ms |",
        "| SDXL, masked | 1900 | 3 | 25.0 |",
        "| SDXL | `gemm` | 7 | 1.50 |",
        "| pages of the second edit of a picture | hit, device |",
        "| 1 | alike | 27.0 |",
        "12 passed in 3.4s",
        "Traceback: here",
        "capture failed",
    ):
        assert said in document, said
    for absent in ("Nothing on this page has run", "Only a trial", "8, as a CUDA graph", "How to read"):
        assert absent not in document


def test_a_run_that_was_cut_off_leaves_what_it_had(tmp_path: Path) -> None:
    report = Report(tmp_path / "results.json", {"device": "d"})
    report.put("a", first_ms=1 / 3)
    report.put("a", second_ms=2)
    report.put("b", batches={"1": {"ms": 1e-9}})
    kept = {"a": {"first_ms": 0.333333, "second_ms": 2}, "b": {"batches": {"1": {"ms": 1e-9}}}}
    assert json.loads((tmp_path / "results.json").read_text())["sections"] == kept
    assert report.sections == kept, "what is printed during the run is of the figures in the file"
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert read(tmp_path / "none.json") is None


def test_a_run_of_some_sections_adds_to_what_there_is(tmp_path: Path) -> None:
    """Of the same device; what is run again is forgotten before, and what is said of it."""
    path = tmp_path / "results.json"
    first = Report(path, {"device": "d"})
    first.put("a", old_ms=1)
    first.put("b", ms=2)
    first.put("broken", a="Traceback")
    second = Report(path, {"device": "d"}, goes_on=True)
    second.begin("a")
    second.put("a", ms=3)
    assert second.sections == {"a": {"ms": 3}, "b": {"ms": 2}}
    assert Report(path, {"device": "another"}, goes_on=True).sections == {}
    assert Report(path, {"device": "d"}).sections == {}


def bench_of(tmp_path: Path, minutes: float = 10.0) -> Bench:
    return Bench(CPU, torch.float32, TINY, Report(tmp_path / "results.json", {"device_type": "cpu"}), minutes)


def test_a_section_that_breaks_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        bench.report.put("a", first_ms=1.0)
        raise RuntimeError("no such kernel")

    bench = bench_of(tmp_path)
    table = {"a": Section(broken, 9), "b": Section(lambda: bench.report.put("b", ms=2.0), 9)}
    monkeypatch.setattr(sections, "sections", lambda bench: table)
    sections.run_sections(bench, [], unwanted)
    assert bench.report.sections["a"] == {"first_ms": 1.0}
    assert bench.report.sections["b"] == {"ms": 2.0}
    assert "no such kernel" in bench.report.sections["broken"]["a"]


def test_a_family_that_breaks_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"float32": {"exact": {"mean_levels": 0.0}}}

    def compare(path: Path, bench: Bench, scale: int) -> Any:
        if path.name == "flux_fill":
            raise RuntimeError("no such kernel")
        return figures

    bench = bench_of(tmp_path)
    monkeypatch.setattr(correctness, "_compare", compare)
    with pytest.raises(ExceptionGroup, match="checkpoints that failed"):
        correctness.edits(bench)
    others = [name for name in bench.size.checkpoints if name != "flux_fill"]
    assert bench.report.sections["correctness"]["checkpoints"] == dict.fromkeys(others, figures)


def unwanted(rest: Any) -> None:
    raise AssertionError(f"{rest} were to be done elsewhere")


def test_after_a_kernel_that_broke_the_device_the_rest_is_done_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, elsewhere = bench_of(tmp_path), list[Any]()
    monkeypatch.setattr(sections, "sections", lambda bench: dict.fromkeys("abc", Section(lambda: None, 9)))
    monkeypatch.setattr(Bench, "is_usable", lambda self: bool(elsewhere))
    sections.run_sections(bench, [], elsewhere.append)
    assert elsewhere == [["b", "c"]]


def test_a_section_that_hangs_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, elsewhere, is_over = bench_of(tmp_path), list[Any](), threading.Event()

    def go_on(rest: Any) -> None:
        elsewhere.append(rest)
        is_over.set()

    table = {"a": Section(is_over.wait, 0.1, has_graphs=True), "b": Section(lambda: None, 9)}
    monkeypatch.setattr(sections, "sections", lambda bench: table)
    sections.run_sections(bench, [], go_on)
    assert elsewhere == [["b"]]
    assert "cut off" in bench.report.sections["skipped"]["a"]
    assert not bench.graphs.are_on, "they may be what hangs"


def test_a_section_that_fails_with_graphs_is_run_again_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no later one has them."""
    bench, seen = bench_of(tmp_path), list[tuple[str, bool]]()

    def run(name: str) -> None:
        seen.append((name, bench.graphs.are_on))
        if bench.graphs.are_on and name == "b":
            raise RuntimeError("operation not permitted when stream is capturing")
        bench.report.put(name, ms=1.0)

    table = {name: Section(partial(run, name), 9, has_graphs=True) for name in "abc"}
    monkeypatch.setattr(sections, "sections", lambda bench: table)
    sections.run_sections(bench, [], unwanted)
    assert seen == [("a", True), ("b", True), ("b", False), ("c", False)]
    assert bench.report.sections["b"] == {"ms": 1.0}
    assert "broken" not in bench.report.sections
    assert "stream is capturing" in bench.report.sections["without_graphs"]["b"]


def test_graphs_that_break_the_device_are_left_out_in_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, elsewhere = bench_of(tmp_path), list[Any]()

    def broken() -> None:
        raise RuntimeError("illegal memory access")

    def go_on(rest: Any) -> None:
        elsewhere.append((list(rest), bench.graphs.are_on))
        raise SystemExit

    table = {"a": Section(broken, 9, has_graphs=True), "b": Section(lambda: None, 9)}
    monkeypatch.setattr(sections, "sections", lambda bench: table)
    monkeypatch.setattr(Bench, "is_usable", lambda self: False)
    with pytest.raises(SystemExit):
        sections.run_sections(bench, [], go_on)
    assert elsewhere == [(["a", "b"], False)]


class Captured:
    """A model whose graphs note how they were asked for."""

    def __init__(self) -> None:
        self.graphs = self
        self.enabled = True
        self.stats = SimpleNamespace(captures=2, replays=5, failed=0, capture_seconds=0.2)
        self.taken_bytes = 10**9

    def clear(self) -> None:
        self.taken_bytes = 0


def test_graphs_are_turned_on_and_off() -> None:
    model: Any = Captured()
    switch, calls = GraphSwitch(model, GraphChoice()), list[bool]()
    assert switch.works
    for call in (switch.eager, switch.replayed, switch.eager):
        call(lambda: calls.append(model.enabled))()
    assert calls == [False, True, False]
    assert switch.figures() == {"captures": 2, "replays": 5, "failed": 0, "capture_ms": 100.0, "pool_gb": 1.0}
    switch.clear()
    assert switch.figures()["pool_gb"] == 0.0
    model.enabled = True
    refused = GraphSwitch(model, GraphChoice(are_on=False))
    refused.replayed(lambda: calls.append(model.enabled))()
    assert calls[-1] is False
    assert not refused.works
    assert not GraphSwitch(model, GraphChoice()).works, "a model that cannot capture its steps"


def test_nothing_is_begun_without_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(tmp_path, minutes=0.1)
    monkeypatch.setattr(sections, "sections", lambda bench: {"a": Section(lambda: unwanted("a"), 9)})
    sections.run_sections(bench, [], unwanted)
    assert bench.report.sections == {"skipped": {"a": "no time was left"}}


HANGING = """
import time
from benchmarks.gpu import sections
table = sections.sections
sections.sections = lambda bench: {name: each._replace(seconds=1.0) for name, each in table(bench).items()}
sections.flux_sections.cold = lambda *_: time.sleep(600)
"""


@pytest.mark.slow  # see `make test-slow`
def test_what_is_left_is_done_in_a_new_process(tmp_path: Path) -> None:
    process = check(HANGING, tmp_path, "--only", "flux_cold", "flux_host_pages")
    assert process.returncode == 0, process.stderr[-3000:]
    results = results_in(tmp_path)
    assert set(results["sections"]["skipped"]) == {"flux_cold"}
    assert results["sections"]["flux_host_pages"]["host_edit_s"] > 0
    document = (tmp_path / "gpu.md").read_text()
    assert "- `flux_cold`: what is missing was cut off after 1 s" in document


PACKAGES = {"PIL": "pillow", "zmq": "pyzmq", "prometheus_client": "prometheus-client"}
"""Modules by other names than their packages."""
BESIDE = {
    *("torch", "triton", "transformers", "accelerate", "tokenizers", "safetensors", "huggingface_hub", "numpy"),
    *("pillow", "prometheus-client", "tqdm", "uvloop"),
}
"""What a machine with PyTorch and transformers has."""
OURS = {"benchmarks", "core", "engine", "entrypoints", "model_executor", "tools"}


def test_its_packages_are_in_its_list() -> None:
    """Of all modules that it and the processes of `served` import when they start; on a machine without network nothing
    else can be had."""
    names = (line.partition("==")[0].strip() for line in REQUIREMENTS.read_text().splitlines() if line[:1] != "#")
    allowed = {*names, *BESIDE, *sys.stdlib_module_names}
    modules, seen = ["benchmarks.gpu.__main__", "entrypoints.image_engine", *SPAWNED], set[str]()
    while modules:
        module = modules.pop()
        if module in seen or (path := source(module)) is None:
            continue
        seen.add(module)
        for name in imports(ast.parse(path.read_text()).body):
            top = name.partition(".")[0]
            assert top in OURS or PACKAGES.get(top, top) in allowed, f"{module} imports {name}"
            modules += [name] if top in OURS else []
    assert {"benchmarks.micro.unet_step", "engine.images.image_pool", *SPAWNED} <= seen


SPAWNED = ("engine.engine_core.engine_process", "engine.images.image_processor", "model_executor.worker.main")
REQUIREMENTS = ROOT / "benchmarks" / "gpu" / "requirements.txt"


def source(module: str) -> Path | None:
    """The file of a module of ours, None for a name within one."""
    path = ROOT.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)


def imports(body: list[ast.stmt]) -> Iterator[str]:
    """What these statements import, and what could be modules within it."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
            yield statement.module
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def test_its_versions_are_the_projects() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    wanted = [line for line in REQUIREMENTS.read_text().splitlines() if line[:1] != "#"]
    assert wanted
    assert set(wanted) <= set(constraints)


def test_the_tests_of_a_gpu_are_found() -> None:
    files = files_of_tests()
    assert "tests/model_executor/kernels/test_triton_kernels.py" in files
    assert "tests/model_executor/kernels/test_on_gpu.py" in files
    assert "tests/benchmarks/test_gpu.py" not in files


def test_copies_hide_under_computation_where_both_run() -> None:
    assert hidden_share([(0, 1)], [(0.25, 0.75)]) == 0.5
    assert hidden_share([(0, 1), (0.5, 2)], [(0, 1), (1, 2)]) == 1.0, "time that is copied twice counts once"
    assert hidden_share([(0, 1)], [(1, 2)]) == 0.0
    assert hidden_share([], [(0, 1)]) == 1.0
    assert merged([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]


def test_a_profilers_events_become_spans() -> None:
    """By the names that PyTorch's profiler gives to what a GPU does."""

    def event(name: str, start: int, end: int, device: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))

    events = [
        event("void flash_fwd_kernel", 250_000, 750_000),
        event("Memcpy HtoD (Pinned -> Device)", 0, 1_000_000),
        event("Memcpy DtoD (Device -> Device)", 10, 9_000_000),
        event("Memset (Device)", 20, 9_000_000),
        event("aten::copy_", 0, 9_000_000, DeviceType.CPU),
        event("cudaLaunchKernel", 0, 9_000_000, DeviceType.CPU),
    ]
    trace: Any = SimpleNamespace(events=lambda: events)
    works = work_of(trace, DeviceType.CUDA)
    assert len(works) == 4, "kernels, copies and fills are launched"
    copies, kernels = device_spans(works)
    assert (copies, kernels) == ([(0.0, 1.0)], [(0.25, 0.75)])
    assert hidden_share(copies, kernels) == 0.5
    assert [work.name for work in work_of(trace, DeviceType.CPU)] == ["aten::copy_"]


def test_time_is_listed_by_kernel() -> None:
    works = [Work("a", 0, 1), Work("b", 1, 4), Work("a", 4, 5), Work("c", 5, 5.5), Work("d" * 200, 6, 6.25)]
    rows = [(row["name"], row["calls"], row["ms"]) for row in by_kernel(works, 2)]
    assert rows == [("b", 1, 3000.0), ("a", 2, 2000.0), ("others", 2, 750.0)]
    assert [len(row["name"]) for row in by_kernel(works[-1:], 2)] == [90]


def test_an_edits_mask_is_at_another_place_than_the_one_before() -> None:
    boxes = [box_at(place, 0.2, 32) for place in range(12)]
    assert len(set(boxes)) == 12
    left, top, right, bottom = middle_box(0.2, 32)
    assert {(box[2] - box[0], box[3] - box[1]) for box in boxes} == {(right - left, bottom - top)}
    assert all(left >= 0 and top >= 0 and right <= 32 and bottom <= 32 for left, top, right, bottom in boxes)
    tokens = [tuple(box_tokens(819, 64, CPU, place).tolist()) for place in range(12)]
    assert len(set(tokens)) == 12
    assert {len(each) for each in tokens} == {819}
    assert all(list(each) == sorted(set(each)) and each[-1] < 64**2 for each in tokens)
    turn = rotating([lambda number=number: number for number in range(2)])  # type: ignore[misc]
    assert [turn() for _ in range(3)] == [0, 1, 0]


@torch.inference_mode()
def test_a_run_reads_one_keyframe_where_a_step_is_at_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine does: the other one's pages are not read, nor waited for."""
    bench = FluxBench(bench_of(tmp_path))
    entries = [bench.entry().zero_() for _ in bench.keyframes()]
    weights = list[tuple[bool, float]]()

    def note(rows: Any) -> None:
        weights.append((rows[0].pages.far is None, rows[0].pages.weight))

    monkeypatch.setattr(bench.denoiser, "forward", note)
    resident_run(bench, bench.box(0.2), entries)()
    assert weights == [(True, 0.0), (False, 0.5), (True, 0.0), (False, 0.5)]


@pytest.mark.parametrize(("number", "side"), [(1, 4), (3, 4), (410, 64), (16, 4)])
def test_a_box_of_tokens(number: int, side: int) -> None:
    tokens = box_tokens(number, side, CPU)
    assert len(tokens) == number
    assert tokens.tolist() == sorted(set(tokens.tolist()))
    assert max(tokens % side) <= max(tokens // side) + 1
    assert tokens.max() < side * side


def test_differences_are_counted_over_all_pictures() -> None:
    first, second = torch.zeros(2, 2, 3).byte().numpy(), torch.full((2, 2, 3), 9).byte().numpy()
    assert difference([first, second], [first, first]) == {
        "max_levels": 9,
        "mean_levels": 4.5,
        "share_within_1": 0.5,
    }


def products(block: nn.Module) -> list[nn.Linear]:
    """Linear layers that run once per token; those of modulation run once per request."""
    layers = block.named_modules()
    return [layer for name, layer in layers if isinstance(layer, nn.Linear) and "norm" not in name]


def test_flop_and_bounds_are_the_shapes(tmp_path: Path) -> None:
    """Counted from the configuration, as the products of the module's own weights would be."""
    bench = FluxBench(bench_of(tmp_path))
    blocks = [*bench.module.transformer_blocks, *bench.module.single_transformer_blocks]
    weights = [sum(layer.weight.numel() for layer in products(block)) for block in blocks]
    num_double = len(bench.module.transformer_blocks)
    per_token = sum(weights[:num_double]) / 2 + sum(weights[num_double:])  # a token passes one stream of a double block
    tokens, hidden = TINY.flux.image_tokens + TINY.flux.text_tokens, bench.module.inner_dim
    attention = len(blocks) * 2 * 2 * tokens**2 * hidden
    assert bench.flop == pytest.approx(2 * tokens * per_token + attention)


def test_the_full_size_has_the_bounds_of_the_bars() -> None:
    document = render([])
    assert "| 0.1 | 410 | 5.00x |" in document
    assert "| 0.2 | 819 | 3.46x |" in document
    assert (FULL.flux.image_tokens, FULL.flux.steps, FULL.flux.keyframes) == (4096, 28, 5)


@pytest.fixture
def on_meta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A device that computes nothing, and refuses what lies on another one, as a GPU does."""
    monkeypatch.setattr(flux, "best_operators", lambda device: GpuOperators())
    return Bench(torch.device("meta"), torch.bfloat16, TINY, Report(tmp_path / "results.json", {}), 1.0)


@torch.inference_mode()
def test_flux_mixes_no_devices(on_meta: Bench) -> None:
    bench = FluxBench(on_meta)
    entries = [bench.entry() for _ in bench.keyframes()]
    edits = [(entries[0], entries[1])] * 2
    calls = [
        bench.exact(2),
        bench.diffusers(2),
        bench.prime(entries),
        bench.edits(0.2, edits),
        exact_run(bench),
        resident_run(bench, bench.box(0.2), entries),
        *(twin.edits(0.2, edits) for twin in bench.attending(ways_of(on_meta.device)).values()),
    ]
    assert len(calls) == 9
    for call in calls:
        call()


@torch.inference_mode()
def test_sdxl_mixes_no_devices(on_meta: Bench) -> None:
    sdxl = Sdxl(on_meta)
    for call in (sdxl.exact(), sdxl.masked(), sdxl.masked_runs(1), sdxl.diffusers()):
        call()
    assert sdxl.bound() > 1
