"""The contests `ddit`: latencies of videos on 8 and 64 devices, beside fixed degrees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean

from benchmarks.report import percentile
from benchmarks.simulation.arena.bar import Bar
from benchmarks.simulation.arena.contest import MEAN, P99, Contest, Metric, Values
from benchmarks.simulation.arena.tournament import Played
from benchmarks.simulation.arena.verdict import best_of, values
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.video_engine import serve
from benchmarks.simulation.video_load import VideoLoad
from benchmarks.simulation.videos import CELLS, MORE_MIXES, STATIC, Cell

POLICIES = (OURS, "former elastic", "ddit", *STATIC)

LEAST_P99, LEAST_MEAN = 1.7, 2.2
"""With 64 devices in a burst: of degree 4, as multiples of ours, the mean over the load's mixes."""

LEAST_BURST = 1.2
"""In a burst: mean latency of the best fixed degree, as a multiple of ours, in each of the load's mixes."""

LEAST_ANYWHERE = 0.97
"""The best fixed degree of any cell, as a multiple of ours."""

SEEDS = {"burst of 8": 8, "burst of 64": 1, "stream": 2}
"""Kind of cell -> seeds at most: a run on 64 devices takes 15 s."""


def contests() -> list[Contest]:
    """One per cell and mix; on 64 devices of the load's mixes alone."""
    mixes = VideoLoad.read().mixes
    return [
        Contest(_name(cell, mix), partial(_play, cell, mix), POLICIES, (MEAN, P99), SEEDS[_kind(cell)])
        for cell in CELLS
        for mix in (mixes if _kind(cell) == "burst of 64" else (*mixes, *MORE_MIXES))
    ]


def _name(cell: Cell, mix: Sequence[float]) -> str:
    return f"{cell.name}, {' '.join(f'{share:g}' for share in mix)}"


def _kind(cell: Cell) -> str:
    return "stream" if cell.rate else f"burst of {cell.devices}"


def _play(cell: Cell, mix: tuple[float, ...], policy: str, seed: int) -> Values:
    load = VideoLoad.read()
    latencies = serve(load, mix, load.arrivals(mix, cell.number, cell.rate, seed), policy, cell.devices).latencies
    return {MEAN: fmean(latencies), P99: percentile(latencies, 0.99)}


def bars(played: Sequence[Played]) -> Iterator[Bar]:
    """Ratios to fixed degrees."""
    mine = {each.contest.name: each for each in played if OURS in each.results and each.results.keys() >= {*STATIC}}
    mixes = VideoLoad.read().mixes
    large = [mine[name] for mix in mixes if (name := _name(CELLS[-1], mix)) in mine]
    if large:
        for metric, least in ((P99, LEAST_P99), (MEAN, LEAST_MEAN)):
            ratio = fmean(_ratio(each, metric, ["SDoP 4"]) for each in large)
            yield Bar(f"64 devices, burst: {metric.name} of degree 4 to ours", ratio, least)
    bursts = [_name(cell, mix) for cell in CELLS if not cell.rate for mix in mixes]
    for name in (name for name in bursts if name in mine):
        yield Bar(f"{name}: {MEAN.name} of the best degree to ours", _ratio(mine[name], MEAN, STATIC), LEAST_BURST)
    for metric in (MEAN, P99):
        if mine:
            name = min(mine, key=lambda name: _ratio(mine[name], metric, STATIC))
            ratio = _ratio(mine[name], metric, STATIC)
            yield Bar(f"least {metric.name} of the best degree to ours ({name})", ratio, LEAST_ANYWHERE)


def _ratio(played: Played, metric: Metric, others: Sequence[str]) -> float:
    best = best_of(others, metric, played.results)
    return fmean(values(played.results, best, metric)) / fmean(values(played.results, OURS, metric))
