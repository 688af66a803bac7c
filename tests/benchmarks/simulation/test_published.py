"""Published traces in simulated time: the real scheduler serves them, and files of another form are refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.simulation.__main__ import main
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.module_engine import OVERHEAD, POLICIES, serve
from benchmarks.simulation.module_trace import Cell, ModuleTrace
from benchmarks.simulation.published import DATA, PAPERS, Result, advantage, closeness, mean_batches

FILES = [DATA / name for names in PAPERS.values() for name in names]
NUM_REQUESTS = 40
LESS_BY_CHANCE = 2
"""Requests in time: policies that are equal on the whole trace differ by so many on a short one."""


def short(path: Path, slo: float = 1.5) -> ModuleTrace:
    """The first requests of one cell, with a fifth of their steps, and that much faster."""
    trace = ModuleTrace.read(path)
    cell = next(cell for cell in trace.cells() if cell.slo == slo)
    name = cell.name.rpartition(" ")[0]
    gaps = [gap / 5 for _, gap in zip(range(NUM_REQUESTS), intervals(trace, cell), strict=False)]
    return msgspec.structs.replace(
        trace,
        num_requests=NUM_REQUESTS,
        steps=[steps // 5 for steps in trace.steps[:NUM_REQUESTS]],
        intervals_seconds={name: gaps},
        goodput={cell.name: {system: [1] for system in trace.goodput[cell.name]}},
    )


def intervals(trace: ModuleTrace, cell: Cell) -> list[float]:
    arrivals = trace.arrivals(cell)
    return [later - earlier for earlier, later in zip([0.0, *arrivals], arrivals, strict=False)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_policy_serves_a_trace(path: Path) -> None:
    trace = short(path)
    (cell,) = trace.cells()
    served = {policy: serve(trace, cell, policy) for policy in POLICIES}
    assert all(0 < result.goodput <= NUM_REQUESTS for result in served.values())
    best = max(result.goodput for result in served.values())
    assert served[OURS].goodput + LESS_BY_CHANCE >= best > served["clockwork"].goodput
    for result in served.values():
        assert {module for _, module, _ in result.batches} == set(trace.modules)
        assert all(
            size <= max(trace.latency_seconds[trace.loop]) for _, module, size in result.batches if module == trace.loop
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_clockwork_batches_requests_whose_objective_allows_it(path: Path) -> None:
    trace = short(path, slo=5.0)
    (cell,) = trace.cells()
    mixed, equal = (mean_batches(serve(trace, cell, policy)) for policy in ("clockwork_ideal", "clockwork"))
    assert mixed[trace.loop] > equal[trace.loop] >= 1


def test_a_request_takes_as_long_as_the_tables_say() -> None:
    trace = short(FILES[0])
    (cell,) = trace.cells()
    alone = msgspec.structs.replace(
        trace, num_requests=1, steps=trace.steps[:1], intervals_seconds={"rate=2 cv=2": [1.0]}
    )
    served = serve(alone, cell, OURS)
    assert served.goodput == 1
    assert served.batches[-1][0] - 1.0 == pytest.approx((1 + OVERHEAD) * trace.alone_seconds(trace.steps[0]))


def test_the_command_writes_the_goodput_of_every_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "trace.json", tmp_path / "out.json"
    trace = short(FILES[1])
    path.write_bytes(msgspec.json.encode(trace))
    main(["--trace", str(path), "--output", str(output), "--plots", str(tmp_path), "--processes", "1"])
    (cell,) = json.loads(output.read_text())["cells"].items()
    assert cell[0] == next(trace.cells()).name
    assert set(cell[1]) == set(POLICIES)
    table = capsys.readouterr().out
    assert "total" in table
    for line in ("steps as drawn", "equal steps"):
        (batches,) = (each for each in table.splitlines() if each.startswith(line))
        assert batches.count("(1.00x)") >= 1, "clockwork's own"
    assert all(any(line.startswith(module) for line in table.splitlines()) for module in trace.latency_seconds)
    assert len(list(tmp_path.glob("*.svg"))) == 2


def test_a_file_without_one_loop_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = msgspec.structs.replace(ModuleTrace.read(FILES[0]), latency_seconds={"vae": {1: 0.1}})
    path.write_bytes(msgspec.json.encode(trace))
    with pytest.raises(ValueError, match="one module needs a name with one of"):
        ModuleTrace.read(path)


def test_summaries_count_what_they_say() -> None:
    trace = ModuleTrace.read(FILES[0])
    cells = {cell.name: cell for cell in trace.cells()}
    low, high = cells["rate=2 cv=2 slo=1.2"], cells["rate=2 cv=2 slo=5.0"]
    results = [
        Result(low, {"neustream": 200, OURS: 220}, {}),
        Result(high, {"neustream": 500, OURS: 497}, {}),
    ]
    assert advantage(trace, results).startswith("+10.0% over the 1 cells where it serves under 90%; least -3 (")
    assert closeness(trace, results, "neustream").startswith("-1.3% in total of the measured; 2 of 2 cells")
