"""The arena's scenarios by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.simulation.arena import (
    mixed,
    one_rank,
    overload,
    published_cells,
    routed,
    traced_models,
    troubles,
    video_cells,
    workflow_cells,
)
from benchmarks.simulation.arena.bar import Bar
from benchmarks.simulation.arena.contest import Contest
from benchmarks.simulation.arena.tournament import Played


def _no_bars(played: Sequence[Played]) -> Iterable[Bar]:
    return ()


class Scenario(NamedTuple):
    """policies: names. contests: makes them. bars: figures over the contests that were played."""

    policies: tuple[str, ...]
    contests: Callable[[], list[Contest]]
    bars: Callable[[Sequence[Played]], Iterable[Bar]] = _no_bars


SCENARIOS: dict[str, Scenario] = {
    "neustream": Scenario(published_cells.POLICIES, published_cells.contests, published_cells.bars),
    "ddit": Scenario(video_cells.POLICIES, video_cells.contests, video_cells.bars),
    "mixed": Scenario(mixed.POLICIES, mixed.contests, mixed.bars),
    "overload": Scenario(overload.POLICIES, overload.contests),
    "troubles": Scenario(troubles.POLICIES, troubles.contests, troubles.bars),
    "routing": Scenario(routed.POLICIES, routed.contests),
    "models": Scenario(traced_models.POLICIES, traced_models.contests),
    "workflows": Scenario(workflow_cells.POLICIES, workflow_cells.contests),
    "one-rank": Scenario(one_rank.POLICIES, one_rank.contests),
}


def bars(every: Sequence[Played]) -> Iterator[Bar]:
    """The bars of all scenarios that were played."""
    for name, scenario in SCENARIOS.items():
        for bar in scenario.bars([played for played in every if played.group == name]):
            yield bar._replace(name=f"{name}: {bar.name}")
