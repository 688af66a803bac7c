"""The benchmark of a load beside steps, with a component small enough for a test."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from forked_processes import fork

from benchmarks.micro import model_load


def test_it_prints_the_longest_gap_on_both_ranks(
    launcher: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_load, "HEADS", 1)
    monkeypatch.setattr(model_load, "spawn", partial(fork, launcher))
    model_load.main(["--rounds", "1", "--threads", str(torch.get_num_threads())])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for rank in ("same_rank", "other_rank"):
        assert result[f"{rank}_longest_ms"] > 0
        assert result[f"{rank}_step_ms"] > 0
        assert result[f"{rank}_allowed_ms"] >= 20
        assert result[f"{rank}_load_seconds"] > 0
