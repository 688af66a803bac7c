"""The benchmark of LegoDiffusion's twelve workflows, with small weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_process import fork

from benchmarks.serving.lego_layout import write
from benchmarks.serving.twelve_workflows import measure


@pytest.mark.slow
def test_twelve_workflows_share_components_and_steps(tmp_path: Path) -> None:
    layout = write(tmp_path / "layout")
    assert len(layout.workflows) == 12
    server = fork(tmp_path / "scratch", "--dtype", "float32", "--threads", "1", "--no-mask-aware", *layout.flags)
    result = measure(server.url, layout, steps=4, rounds=2)
    assert server.stop() == 0, server.log.read_text()
    assert result["num_wrong"] == 0
    assert 0 < int(result["mixed_steps"]) <= int(result["all_steps"])
    resident = float(result["resident_mb"]) * 1e6
    assert resident <= 1.1 * layout.distinct_bytes < 0.6 * layout.separate_bytes
