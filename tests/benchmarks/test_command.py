"""Shared options, reports, and measurements in turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.command import command, model_flags
from benchmarks.report import print_report
from benchmarks.turns import in_turns, median_ratio, medians


def test_a_command_has_the_shared_options_it_asks_for() -> None:
    parser = command("doc", model="m", dtype="float32", threads=2)
    args = parser.parse_args(["--threads", "3"])
    assert model_flags(args) == ["--model", "m", "--dtype", "float32", "--threads", "3"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--rounds", "1"])


def test_lines_of_json_are_written_to_the_output_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    path.write_text("of an earlier run\n")
    output = command("doc").parse_args(["--output", str(path)]).output
    for number in (1, 2):
        print_report("title", [("what", "1")], {"number": number, "seconds": 0.123456789}, output)
    written = path.read_text().splitlines()
    assert [json.loads(line) for line in written] == [{"number": n, "seconds": 0.12346} for n in (1, 2)]
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")] == written


def test_ways_take_turns_and_warm_ups_do_not_count() -> None:
    order = list[str]()

    def way(name: str) -> float:
        order.append(name)
        return float(len(order))

    figures = in_turns({name: lambda name=name: way(name) for name in "ab"}, rounds=2)  # type: ignore[misc]
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert figures == {"a": [4.0, 5.0], "b": [3.0, 6.0]}
    assert medians({"c": lambda: 2.0}, rounds=3) == {"c": 2.0}


def test_a_median_of_ratios_is_not_the_ratio_of_medians() -> None:
    assert median_ratio([1.0, 4.0, 100.0], [1.0, 1.0, 10.0]) == 4.0
