"""The benchmarks of LegoDiffusion's twelve workflows, with small weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_process import fork

from benchmarks.serving import lego_cells
from benchmarks.serving.lego_cells import SYSTEMS, Bench, Cell
from benchmarks.serving.lego_layout import write
from benchmarks.serving.lego_profile import known
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


@pytest.mark.slow
def test_whole_workflows_are_swapped_and_make_the_same_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(lego_cells, "STEPS", dict.fromkeys(lego_cells.STEPS, 2))
    layouts = (
        write(tmp_path / "shared", are_written=False),
        write(tmp_path / "separate", are_separate=True, are_written=False),
    )
    shared, separate = known(layouts, ())
    room = layouts[0].distinct_bytes // 2
    bench = Bench(layouts, (shared, separate), 2, room, number=12, slo_scale=1000.0, cv=2.0)
    alone = bench.measure_alone()
    loads = {}
    for name in ("default", "Diffusers-C"):
        ((_, served),) = bench.measure(SYSTEMS[name], alone, [Cell(0.5, seed=0)], least=0.0)
        assert served.num_requests == served.num_pictures == sum(bench.numbers.values())
        assert served.num_wrong == 0
        loads[name] = served.num_loads
    assert loads["Diffusers-C"] > loads["default"], "whole workflows are swapped"
