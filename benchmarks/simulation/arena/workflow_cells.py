"""The contests `workflows`: LegoDiffusion's, whose models share devices, in a small form."""

from __future__ import annotations

from functools import partial

import msgspec

from benchmarks.simulation.arena.contest import IN_TIME, Contest, Metric, Values
from benchmarks.simulation.compared import FORMER, OURS
from benchmarks.simulation.lego.experiments import BURSTY, HALF_GIGABYTES, POISSON
from benchmarks.simulation.lego.measures import Cell, run, worst
from benchmarks.simulation.lego.numbers import Numbers
from benchmarks.simulation.lego.site import Site

POLICIES = (OURS, *FORMER, "lego")

WORST = Metric("worst workflow in time", is_more_better=True, is_judged=False)

NUM_REQUESTS, ROUNDS, NUM_DEVICES = 150, 4, 8

MOST_SEEDS = 4


def contests() -> list[Contest]:
    numbers = msgspec.structs.replace(Numbers.read(), most_rounds=ROUNDS)
    small = msgspec.structs.replace(numbers, device_gigabytes=HALF_GIGABYTES)
    cells = {
        "S1, Poisson, load 0.9": Cell(Site(numbers, "S1", NUM_DEVICES), POISSON, 0.9, NUM_REQUESTS),
        "S6, Poisson, load 0.9": Cell(Site(numbers, "S6", NUM_DEVICES), POISSON, 0.9, NUM_REQUESTS),
        "S6, Poisson, load 1.5": Cell(Site(numbers, "S6", NUM_DEVICES), POISSON, 1.5, NUM_REQUESTS),
        "S6, Poisson, load 0.4, no slack": Cell(Site(numbers, "S6", NUM_DEVICES, 1.0), POISSON, 0.4, NUM_REQUESTS),
        "S6, bursts by workflow, load 0.4": Cell(Site(numbers, "S6", NUM_DEVICES), BURSTY, 0.4, NUM_REQUESTS),
        "S6, Poisson, load 0.7, half the memory": Cell(Site(small, "S6", NUM_DEVICES), POISSON, 0.7, NUM_REQUESTS),
    }
    return [
        Contest(name, partial(_play, cell), POLICIES, (IN_TIME, WORST), MOST_SEEDS, number=1 / NUM_REQUESTS)
        for name, cell in cells.items()
    ]


def _play(cell: Cell, policy: str, seed: int) -> Values:
    served = run(cell, policy, seed)
    return {IN_TIME: served.in_time, WORST: worst(served)}
