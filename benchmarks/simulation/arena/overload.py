"""The contests `overload`: masked edits under one objective, at the knee and at twice its rate, admitted as the server
does it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.simulation.arena.contest import IN_TIME, Contest, Values
from benchmarks.simulation.compared import FORMER, OURS, make
from benchmarks.simulation.overloaded_cluster import OverloadedCluster
from benchmarks.simulation.scenario import REFERENCE

POLICIES = (OURS, *FORMER, "neustream")

LEFT = frozenset({"former step_batching", "former elastic"})
"""Policies that left it to the server to decide which edits are too late: admission refused those for them."""

LONE = 28 * (0.006 + 0.1 * (0.15 * 4096 + 512) / 4608)
"""Seconds that a mean edit takes alone."""

SCALE = 3.0
"""The objective, as a multiple of LONE."""

NUMBER = 160

RATES = {"at the knee": 1.0, "at twice the knee": 2.0}
"""Name -> load."""


def contests() -> list[Contest]:
    return [
        Contest(f"{num_ranks} rank{'s' if num_ranks > 1 else ''}, {name}", play, POLICIES, (IN_TIME,))
        for num_ranks in (1, 2)
        for name, load in RATES.items()
        for play in (partial(_play, num_ranks, load),)
    ]


def _play(num_ranks: int, load: float, policy: str, seed: int) -> Values:
    scenario = replace(REFERENCE, num_engines=1, num_ranks=num_ranks, num_edits=NUMBER, load=load)
    cluster = OverloadedCluster(scenario, SCALE * LONE, seed, partial(make, policy), refuses=policy in LEFT)
    return {IN_TIME: cluster.measure(SCALE * LONE).ends["in time"] / NUMBER}
