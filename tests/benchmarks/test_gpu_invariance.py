"""The GPU check's section about `--batch-invariant`, on a CPU at a tiny size: it runs, and there the option holds."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.gpu import invariance
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.flux import FluxBench
from benchmarks.gpu.report import Report
from benchmarks.gpu.sizes import TINY


def test_the_price_of_batch_invariance(tmp_path: Path) -> None:
    report = Report(tmp_path / "results.json", {})
    bench = Bench(torch.device("cpu"), torch.float32, TINY, report, minutes=1.0)
    invariance.run(bench, FluxBench(bench))
    figures = report.sections["invariance"]
    assert figures["differing"] == figures["differing_without"] == 0.0
    assert {f"{name}_ms" for name in ("masked", "exact", "mixed", "masked_without")} <= figures.keys()
