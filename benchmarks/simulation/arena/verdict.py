"""Verdict: how the policy `default` compares with the best of the former ones, over paired seeds."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from benchmarks.simulation.arena.contest import Contest, Metric, Results
from benchmarks.simulation.compared import OURS

_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""97.5 % quantiles of Student's t distribution with 1, 2, ... degrees of freedom; beyond, the last one is safe."""

Word = Literal["better", "equal", "WORSE"]


class Verdict(NamedTuple):
    """The comparison by one metric. Gains are positive where ours is better, whichever way the metric goes."""

    best: str  # the policy that ours is compared with
    gain: float  # mean over seeds, in the metric's unit
    interval: float  # half of the 95 % confidence interval of the gain; 0 with one seed
    base: float  # its mean
    word: Word

    @property
    def text(self) -> str:
        if not self.base:
            return f"{self.gain:+.3g} +- {self.interval:.2g} {self.word}"
        return f"{self.gain / self.base:+.1%} +- {self.interval / abs(self.base):.1%} {self.word}"


def verdict(contest: Contest, metric: Metric, results: Results) -> Verdict | None:
    """None where ours or all former policies were left out, and for a metric that is not judged."""
    former = [name for name in contest.former if name in results]
    if OURS not in results or not former or not metric.is_judged:
        return None
    return against(best_of(former, metric, results), contest, metric, results)


def against(best: str, contest: Contest, metric: Metric, results: Results) -> Verdict:
    """The comparison with one policy. Both have results."""
    gains = _gains(metric, values(results, OURS, metric), values(results, best, metric))
    gain, base = fmean(gains), fmean(values(results, best, metric))
    interval = half_interval(gains)
    allowed = max(interval, contest.share * abs(base), contest.number)
    word: Word = "WORSE" if gain < -allowed else "better" if gain > max(interval, 1e-9 * abs(base)) else "equal"
    return Verdict(best, gain, interval, base, word)


def best_of(policies: Sequence[str], metric: Metric, results: Results) -> str:
    """The policy with the best mean over seeds."""
    sign = 1 if metric.is_more_better else -1
    return max(policies, key=lambda name: sign * fmean(values(results, name, metric)))


def values(results: Results, policy: str, metric: Metric) -> list[float]:
    """A policy's values by seed."""
    return [of_seed[metric] for of_seed in results[policy]]


def _gains(metric: Metric, ours: Sequence[float], others: Sequence[float]) -> list[float]:
    sign = 1 if metric.is_more_better else -1
    return [sign * (mine - other) for mine, other in zip(ours, others, strict=True)]


def half_interval(differences: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of their mean; 0 for a single one, which is all there is."""
    if len(differences) < 2:
        return 0.0
    quantile = _STUDENT[min(len(differences) - 1, len(_STUDENT)) - 1]
    return quantile * stdev(differences) / sqrt(len(differences))
