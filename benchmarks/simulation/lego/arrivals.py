"""Arrivals: when requests come, and for which workflow: Gamma processes, and a production trace."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.simulation.arena import production_trace

Kind = Literal["pooled", "by workflow", "trace", "trace, redrawn"]
"""pooled: one process, workflows drawn by Zipf's law of exponent 1. by workflow: a process of its own for each, of the
same shares. trace: a stretch of GenTD26, squeezed to the rate; the place of a base model by popularity, modulo the
number of workflows, is the workflow. redrawn: each hour as a Gamma process with its rate and mix (section 7.2)."""

TRACE_STARTS = (6000, 12000, 18000, 3000, 21000, 9000, 15000, 1000)
"""Where in the trace the stretches of seeds 0, 1, .. begin."""

_Floats = npt.NDArray[np.float64]


class Arrivals(NamedTuple):
    """cv: coefficient of variation of the times between arrivals; a trace that is not redrawn has its own."""

    kind: Kind = "pooled"
    cv: float = 1.0

    @property
    def text(self) -> str:
        if self.kind == "trace":
            return "GenTD26's arrivals"
        process = "Poisson" if self.cv == 1.0 else f"Gamma of CV {self.cv:g}"
        return f"{process}, {self.kind}"

    def shares(self, number: int) -> list[float]:
        """The share of arrivals that each of so many workflows has; they sum to 1."""
        if self.kind.startswith("trace"):
            places = Counter(rank % number for rank in _trace()[1].tolist())
            return [places[index] / places.total() for index in range(number)]
        weights = [1 / place for place in range(1, number + 1)]
        return [weight / sum(weights) for weight in weights]

    def draw(self, rate: float, number: int, num_workflows: int, seed: int) -> list[tuple[float, int]]:
        """About so many requests, (seconds, index of the workflow), in the order in which they come. rate: per
        second. The same seed draws the same at every rate, but for the pace.
        """
        random = np.random.default_rng(seed)
        if self.kind == "pooled":
            seconds = self._process(random, 1.0, number)
            indexes = random.choice(num_workflows, number, p=self.shares(num_workflows))
        elif self.kind == "by workflow":
            seconds, indexes = self._by_workflow(random, number, self.shares(num_workflows))
        else:
            seconds, indexes = self._of_trace(random, number, num_workflows, seed)
            seconds *= len(seconds) / seconds[-1]
        return list(zip((seconds / rate).tolist(), indexes.tolist(), strict=True))

    def _process(self, random: np.random.Generator, rate: float, number: int) -> _Floats:
        shape = 1 / self.cv**2
        return np.cumsum(random.gamma(shape, 1 / (shape * rate), number))

    def _by_workflow(
        self, random: np.random.Generator, number: int, shares: list[float]
    ) -> tuple[_Floats, npt.NDArray[np.int64]]:
        every = list[_Floats]()
        for share in shares:
            most = int(2 * number * share + 60 * self.cv**2 + 50)
            seconds = self._process(random, share, most) - random.uniform(0, 1) / share
            every.append(seconds[(seconds > 0) & (seconds < number)])
        indexes = np.concatenate([np.full(len(each), index) for index, each in enumerate(every)])
        seconds = np.concatenate(every)
        order = np.argsort(seconds, kind="stable")
        return seconds[order], indexes[order]

    def _of_trace(
        self, random: np.random.Generator, number: int, num_workflows: int, seed: int
    ) -> tuple[_Floats, npt.NDArray[np.int64]]:
        every, ranks = _trace()
        first = TRACE_STARTS[seed % len(TRACE_STARTS)]
        times, indexes = every[first : first + number], ranks[first : first + number] % num_workflows
        seconds = np.sort(times + random.uniform(0, 1, len(times)))  # the file has whole seconds
        if self.kind == "trace, redrawn":
            seconds, indexes = self._redrawn(random, seconds, indexes)
        return seconds - seconds[0], indexes

    def _redrawn(
        self, random: np.random.Generator, seconds: _Floats, indexes: npt.NDArray[np.int64]
    ) -> tuple[_Floats, npt.NDArray[np.int64]]:
        hours, parts, mixes = (seconds // 3600).astype(int), list[_Floats](), list[npt.NDArray[np.int64]]()
        for hour in np.unique(hours):
            mine = indexes[hours == hour]
            rate = len(mine) / 3600
            drawn = self._process(random, rate, 3 * len(mine) + int(30 * self.cv**2)) - random.uniform(0, 1) / rate
            drawn = drawn[(drawn > 0) & (drawn < 3600)]
            parts.append(3600.0 * hour + drawn)
            mixes.append(random.choice(mine, len(drawn)))
        return np.concatenate(parts), np.concatenate(mixes)


@cache
def _trace() -> tuple[_Floats, npt.NDArray[np.int64]]:
    """Seconds at which requests came, and the place of their base models, the most popular first."""
    every = list(production_trace.read())
    places = {model: place for place, (model, _) in enumerate(Counter(each.model for each in every).most_common())}
    return np.array([each.seconds for each in every]), np.array([places[each.model] for each in every])
