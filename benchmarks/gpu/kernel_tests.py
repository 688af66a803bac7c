"""The project's own tests of kernels, attention and copies, which a machine without a GPU can run in part only.

Warnings, which are errors elsewhere, are not here: another PyTorch may have other ones.
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.gpu.bench import Bench
from benchmarks.load.server import ROOT

NAME = "kernel_tests"
FILES = ("tests/model_executor/test_triton_kernels.py", "tests/model_executor/test_on_gpu.py")
MAX_SECONDS = 180.0
LINES = 15
"""Kept of what they say at their end."""


def run(bench: Bench) -> None:
    """Without a GPU they are only found. Raises subprocess.TimeoutExpired where they hang."""
    has_gpu = bench.device.type == "cuda"
    options = ["-q", "-m", "not slow", "-W", "default", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *FILES, *([] if has_gpu else ["--collect-only"])]
    settings = {"TRITON_INTERPRET": "0"} if has_gpu else {}
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=MAX_SECONDS
    )
    said = (done.stdout + done.stderr).rstrip().splitlines()[-LINES:]
    bench.report.put(NAME, passed=done.returncode == 0, has_run=has_gpu, said="\n".join(said))
