"""The arena's report: a line per contest and metric, the bars, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from benchmarks.simulation.arena.bar import Bar
from benchmarks.simulation.arena.contest import Metric
from benchmarks.simulation.arena.tournament import Played
from benchmarks.simulation.arena.verdict import Verdict, values, verdict
from benchmarks.simulation.compared import OURS


def means(played: Played) -> Iterator[str]:
    """The means over seeds of one contest, a line per metric."""
    number = max(map(len, played.results.values()), default=0)
    yield f"{played.group}: {played.contest.name} ({number} seed{'s' if number > 1 else ''})"
    for metric in played.contest.metrics:
        each = [f"{name} {_mean(played, name, metric)}" for name in played.results]
        found = verdict(played.contest, metric, played.results)
        yield f"  {metric.name:<18} {'   '.join(each)}" + (f"   | {found.text}" if found else "")
    for policy, why in played.broken.items():
        yield f"  BROKEN {policy}: {why}"


def _mean(played: Played, policy: str, metric: Metric) -> str:
    return f"{fmean(values(played.results, policy, metric)):.4g}"


def summary(every: Sequence[Played], bars: Iterable[Bar]) -> Iterator[str]:
    """One table of all contests, the bars, and how many comparisons ended how."""
    rows = list(_verdicts(every))
    if rows:
        width = max(len(f"{played.group}: {played.contest.name}") for played, _, _ in rows)
        yield f"{'':<{width}}  {'metric':<18}{OURS:>10}{'best former':>34}   gain of ours, 95 % interval"
        for played, metric, found in rows:
            mine, best = _mean(played, OURS, metric), _mean(played, found.best, metric)
            name = f"{played.group}: {played.contest.name}"
            yield f"{name:<{width}}  {metric.name:<18}{mine:>10}{f'{found.best} {best}':>34}   {found.text}"
    for bar in bars:
        yield bar.text
    for played in every:
        for policy, why in played.broken.items():
            yield f"BROKEN {played.group}: {played.contest.name}, {policy}: {why}"
    words = [found.word for _, _, found in rows]
    yield f"{words.count('better')} better, {words.count('equal')} equal, {words.count('WORSE')} worse"


def _verdicts(every: Iterable[Played]) -> Iterator[tuple[Played, Metric, Verdict]]:
    for played in every:
        for metric in played.contest.metrics:
            found = verdict(played.contest, metric, played.results)
            if found is not None:
                yield played, metric, found


def as_json(every: Sequence[Played], bars: Iterable[Bar], seconds: float) -> str:
    """All values by contest, policy, metric and seed, with verdicts."""
    contests = [
        {
            "scenario": played.group,
            "contest": played.contest.name,
            "values": {
                policy: {metric.name: values(played.results, policy, metric) for metric in played.contest.metrics}
                for policy in played.results
            },
            "broken": dict(played.broken),
            "verdicts": {
                metric.name: found._asdict()
                for metric in played.contest.metrics
                if (found := verdict(played.contest, metric, played.results)) is not None
            },
        }
        for played in every
    ]
    return json.dumps(
        {"contests": contests, "bars": [bar._asdict() | {"is_met": bar.is_met} for bar in bars], "seconds": seconds},
        indent=1,
    )
