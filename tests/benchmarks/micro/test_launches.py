"""Launches of a step are counted as a GPU would have them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from benchmarks.load.server import ROOT
from benchmarks.micro.launches import Counter


def test_views_and_empty_tensors_launch_nothing() -> None:
    x = torch.zeros(4, 6)
    with torch.inference_mode(), Counter() as counter:
        x.view(2, 12)[:1].transpose(0, 1)
        x.new_empty(3)
        x.split([1, 3])
    assert counter.launches == 0
    with torch.inference_mode(), Counter() as counter:
        torch.cat([x, x])
        x[:2].add_(1)
        x @ x.t()
    assert counter.launches == 3


@pytest.mark.slow
def test_the_program_counts_every_model() -> None:
    """A FLUX step: 11 of Triton's kernels in each of 19 double blocks, 4 in each of 38 single ones, and a last norm."""
    command, settings = [sys.executable, "-m", "benchmarks.micro.launches"], os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=True, timeout=300)
    assert re.search(r"FLUX.1-dev, 1 edits +362 \+ \d+ launches", done.stdout)
    assert done.stdout.count("launches,") == 6
