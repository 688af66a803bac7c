"""`make gpu-check`: runs on a bare GPU machine within --minutes, and needs nothing from the internet.

Sections come in the order of what they are worth; the file of results is written anew after every figure, so a run that
is cut off leaves what it had. `--device cpu --size tiny` runs all of it anywhere, in seconds, for figures that mean
nothing. Results and document go to --out: by default docs/ from a GPU at full size, else a folder that git ignores.
"""

from __future__ import annotations

import argparse
import logging
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import diffusers.utils.logging
import torch
import transformers.utils.logging

from benchmarks.gpu_check import (
    attention,
    correctness,
    flux_cold,
    flux_pages,
    flux_steps,
    kernel_tests,
    overhead,
    sdxl,
    served,
)
from benchmarks.gpu_check.bars import bars
from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.document import DOCUMENT, RESULTS, write_document
from benchmarks.gpu_check.flux import FluxBench
from benchmarks.gpu_check.report import Figures, Report
from benchmarks.gpu_check.sizes import SIZES
from benchmarks.server import ROOT

MIN_SECONDS = 20.0
"""A section is not begun with less left."""

PACKAGES = ("torch", "triton", "diffusers", "transformers")

logger = logging.getLogger("stencil.gpu_check")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 where a section broke off; a bar that is missed is a result."""
    args = _parse(argv)
    out = args.out or _folder(args)
    out.mkdir(parents=True, exist_ok=True)
    if not args.write_only:
        device = torch.device(args.device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        report = Report(out / RESULTS, _about(device, args.size))
        _quieten(device)
        bench = Bench(device, dtype, SIZES[args.size], report, args.minutes)
        all_ran = _run_sections(bench, args.only)
        for bar in bars(report.sections):
            print(bar.line, flush=True)
    write_document(out)
    print(f"written: {out / DOCUMENT}, from {out / RESULTS}")
    return 0 if args.write_only or all_ran else 1


def _sections(bench: Bench) -> dict[str, Callable[[], None]]:
    """In the order of what they are worth. Those of FLUX share its weights, and its pages after them."""

    @cache
    def flux() -> FluxBench:
        return FluxBench(bench)

    @cache
    def entries() -> list[torch.Tensor]:
        return [flux().entry() for _ in flux().keyframes()]

    def pages() -> None:
        flux().prime(entries())()
        flux_pages.run(bench, flux(), entries())

    def cold() -> None:
        flux_cold.run(bench, flux(), entries())

    def unet() -> None:
        entries.cache_clear()
        flux.cache_clear()
        bench.clear()
        sdxl.run(bench)

    return {
        correctness.NAME: lambda: correctness.run(bench),
        kernel_tests.NAME: lambda: kernel_tests.run(bench),
        flux_steps.NAME: lambda: flux_steps.run(bench, flux()),
        flux_cold.NAME: cold,
        flux_pages.NAME: pages,
        overhead.NAME: lambda: overhead.run(bench),
        served.NAME: lambda: served.run(bench),
        sdxl.NAME: unet,
        attention.NAME: lambda: attention.run(bench),
    }


def _run_sections(bench: Bench, only: Sequence[str]) -> bool:
    """Whether all that there was time for ran to their ends."""
    all_ran = True
    for name, run in _sections(bench).items():
        if only and name not in only:
            continue
        if bench.seconds_left < MIN_SECONDS:
            bench.report.put("skipped", **{name: "no time was left"})
            continue
        print(f"--- {name}, {bench.seconds_left / 60:.1f} minutes left", flush=True)
        all_ran &= _run_section(bench, name, run)
        bench.clear()
    return all_ran


def _run_section(bench: Bench, name: str, run: Callable[[], None]) -> bool:
    started = bench.report.seconds
    try:
        run()
    except Exception:  # the run's edge: one section that breaks must not cost the others their figures
        traceback.print_exc()
        bench.report.put("broken", **{name: traceback.format_exc(limit=-3)})
        return False
    finally:
        bench.report.put("seconds", **{name: round(bench.report.seconds - started, 1)})
    return True


def _about(device: torch.device, size: str) -> Figures:
    """What the figures are of."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "device_type": device.type,
        "memory_gb": torch.cuda.get_device_properties(device).total_memory / 1e9 if device.type == "cuda" else 0.0,
        "cuda": torch.version.cuda or "",
        "size": size,
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _quieten(device: torch.device) -> None:
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    if device.type == "cpu":
        torch.set_num_threads(1)


def _folder(args: argparse.Namespace) -> Path:
    is_real = args.size == "full" and (args.write_only or torch.device(args.device).type == "cuda")
    return ROOT / "docs" if is_real else ROOT / "bench-results" / "gpu-check"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--size", default="full", choices=SIZES, help="tiny: only to see that all of it runs")
    parser.add_argument("--minutes", type=float, default=10.0, help="no section is begun after so many")
    parser.add_argument("--only", nargs="+", default=[], metavar="SECTION", help="these sections alone")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of results and document")
    parser.add_argument("--write-only", action="store_true", help="write the document from the results there are")
    args = parser.parse_args(argv)
    if not args.write_only and torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU; --device cpu --size tiny shows that the check itself runs")
    return args


if __name__ == "__main__":
    sys.exit(main())
