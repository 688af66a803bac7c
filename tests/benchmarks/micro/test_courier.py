"""The benchmark of couriers, with a real host and engines that answer at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.micro.courier import example, main
from core.messages.request_arrays import copied
from engine.router import local_backend


def test_it_measures_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_backend, "ENTRY", local_backend.ENTRY)  # which it changes
    output = tmp_path / "lines"
    main(["--rounds", "2", "--seconds", "0.3", "--megabytes", "20", "--output", str(output)])
    result = json.loads(output.read_text())
    assert result["megabytes"] == round(sum(copied(example())) / 1e6, 5) > 7
    assert result["there_all_mbps"] > 0
    assert result["here_all_mbps"] > 0
    assert result["there_20_late_p99_ms"] > 0
