"""Plays scenarios of the arena, prints the report and writes it to files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.simulation.arena.plots import write_plots
from benchmarks.simulation.arena.scenarios import SCENARIOS, bars
from benchmarks.simulation.arena.table import as_json, means, summary
from benchmarks.simulation.arena.tournament import Played, play


def compete(
    names: Sequence[str],
    policies: Sequence[str] | None,
    num_seeds: int,
    processes: int,
    output: Path | None,
    folder: Path | None,
) -> list[Played]:
    """names: of scenarios. policies: None: all of each. output: file for JSON. folder: for figures."""
    start, every = time.perf_counter(), list[Played]()
    groups = [(name, SCENARIOS[name].contests()) for name in names]
    for played in play(groups, policies, num_seeds, processes):
        every.append(played)
        for line in means(played):
            print(line, flush=True)
    seconds = time.perf_counter() - start
    print()
    for line in summary(every, bars(every)):
        print(line)
    print(f"{seconds / 60:.1f} minutes with {processes} processes")
    if output is not None:
        output.write_text(as_json(every, bars(every), seconds))
    if folder is not None:
        write_plots(folder, every)
    return every
