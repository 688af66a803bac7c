"""`make gpu-run`: checks and measures a GPU machine within --minutes; needs nothing from the internet.

The most important sections run first. Each card has a file of results, which is rewritten after every figure, so that
an interrupted run keeps them; a run of some sections (--only) adds to it. `--device cpu --size tiny` runs everything on
any machine in seconds, for figures that mean nothing. Results and document go to --out: by default docs/ from a GPU at
full size, else a folder that git ignores.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import diffusers.utils.logging
import torch
import transformers.utils.logging

from benchmarks.gpu.bars import bars
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.document import DOCUMENT, results_file, write_document
from benchmarks.gpu.graphs import GraphChoice
from benchmarks.gpu.report import BROKEN, Figures, Report, read
from benchmarks.gpu.sections import run_sections
from benchmarks.gpu.sizes import SIZES
from benchmarks.load.server import ROOT

PACKAGES = ("torch", "triton", "diffusers", "transformers")

LAST = "none"
"""Stands in place of sections' names: no section is left."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a section failed; a missed bar is a result."""
    args = _parse(argv)
    out = args.out or _folder(args)
    if args.write_only:
        write_document(out)
        return 0
    device = torch.device(args.device)
    if device.index is not None:
        torch.cuda.set_device(device)
    about = _about(device, args.size)
    file = results_file(out, about["device"])
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = results_file(ROOT / "docs", about["device"])
    if args.only and kept.exists() and not file.exists():
        shutil.copy(kept, file)
    _run(args, device, Report(file, about, goes_on=bool(args.only)), out)
    results = read(file)
    sections = {} if results is None else results["sections"]
    for bar in bars(sections):
        print(bar.line, flush=True)
    write_document(out)
    print(f"written: {out / DOCUMENT}, from {file}")
    return int(BROKEN in sections)


def _run(args: argparse.Namespace, device: torch.device, report: Report, out: Path) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    _quieten(device)
    bench = Bench(device, dtype, SIZES[args.size], report, args.minutes, GraphChoice(not args.no_graphs))

    def go_on(rest: Sequence[str]) -> None:
        """Replace this process, which may hang or have broken the device."""
        minutes = max(0.0, bench.seconds_left / 60)
        options = ["--device", args.device, "--size", args.size, "--minutes", f"{minutes}", "--out", str(out)]
        options += [] if bench.graphs.are_on else ["--no-graphs"]
        command = [sys.executable, "-m", "benchmarks.gpu", *options, "--only", *(rest or [LAST])]
        sys.stdout.flush()
        sys.stderr.flush()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the device's too, which frees its memory
        os.execv(sys.executable, command)

    run_sections(bench, args.only, go_on)


def _about(device: torch.device, size: str) -> Figures:
    """The machine, the size and the day that figures are of."""
    return {
        "day": date.today().isoformat(),
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
    return ROOT / "docs" if is_real else ROOT / "bench-results" / "gpu-run"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--size", default="full", choices=SIZES, help="tiny: only shows that everything runs")
    parser.add_argument("--minutes", type=float, default=7.5, help="time limit, without the time to import libraries")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="SECTION", help="run these; others keep what the file has"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of results and document")
    parser.add_argument("--no-graphs", action="store_true", help="without CUDA graphs")
    parser.add_argument("--write-only", action="store_true", help="only write the document, from the results there are")
    args = parser.parse_args(argv)
    if not args.write_only and torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU; --device cpu --size tiny shows that the check itself runs")
    return args


if __name__ == "__main__":
    sys.exit(main())
