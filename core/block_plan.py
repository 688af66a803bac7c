"""Which blocks to compute in full while the pages of the others are still being loaded.

One step runs a model's blocks in order. For each block the choice is: compute all tokens and load nothing, or load the
block's pages and compute the active tokens. Loads run beside the computing, one after the other in block order, and all
start with the step (FlashPS, section 4.2 and figure 9):

    loading      | pages 2  | pages 3  | pages 4  |
    computing    | block 0 in full | block 1 in full | 2 | 3 | 4 |

Times are in one unit, by block. Pages of keys and values allow only a prefix of full blocks: what the inactive tokens'
hidden states are is lost at the first cached block. A family that caches the outputs of blocks may use any subset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Times = Sequence[float]

_Vector = npt.NDArray[np.float64]
_Integers = npt.NDArray[np.intp]


def finish_time(cached: Sequence[bool], compute_full: Times, compute_cached: Times, load: Times) -> float:
    """When the last block is done. cached: whether each block uses its pages."""
    loaded = done = 0.0
    for is_cached, full, active, loading in zip(cached, compute_full, compute_cached, load, strict=True):
        if is_cached:
            loaded += loading
            done = max(loaded, done) + active
        else:
            done += full
    return done


def plan_prefix(compute_full: Times, compute_cached: Times, load: Times) -> int:
    """How many leading blocks to compute in full so that the step ends soonest, the fewest among equals. O(blocks).

    With the first p blocks in full, the end is the longest of these: all computing without a wait, and, for every
    cached block j, the loads up to j followed by the computing from j on. For equal blocks no other subset is faster.
    """
    full_before = [0.0, *accumulate(compute_full)]
    load_before = [0.0, *accumulate(load)]
    best, best_end = len(load), full_before[-1]
    computing = 0.0  # of the blocks from p on, cached
    waiting = float("-inf")  # the longest of loads up to j and computing from j on, over j >= p; loads from block 0
    for p in range(len(load) - 1, -1, -1):
        computing += compute_cached[p]
        waiting = max(waiting, load_before[p + 1] + computing)
        end = max(full_before[p] + computing, waiting - load_before[p])
        if end <= best_end:
            best, best_end = p, end
    return best


def prefix_of(num_full: int, num_blocks: int) -> tuple[bool, ...]:
    """A prefix of full blocks as a choice for every block."""
    return (False,) * num_full + (True,) * (num_blocks - num_full)


def algorithm_1(compute_full: Times, compute_cached: Times, load: Times) -> tuple[bool, ...]:
    """The rule of FlashPS (section 4.2, Algorithm 1): block after block, use the pages if that block then ends no later
    than computed in full. To compare with; there the blocks are equal, here they need not be."""
    loaded = done = 0.0
    cached = []
    for full, active, loading in zip(compute_full, compute_cached, load, strict=True):
        end = max(loaded + loading, done) + active
        cached.append(end <= done + full)
        if cached[-1]:
            loaded, done = loaded + loading, end
        else:
            done += full
    return tuple(cached)


def plan_subset(compute_full: Times, compute_cached: Times, load: Times) -> tuple[bool, ...]:
    """Which blocks to cache, of all subsets, so that the step ends soonest: a dynamic program over (loads end,
    computing ends), of which only pairs are kept that no other pair beats in both.

    Exact. It goes by runs of equal blocks: in each, those in full come first (see `_Run.after`), so that their number
    is all there is to choose. Pairs that cannot beat the best plan known are dropped; with loads all different it is a
    knapsack problem all the same, and their number may grow.
    """
    num_blocks = len(load)
    plan = prefix_of(plan_prefix(compute_full, compute_cached, load), num_blocks)
    runs = _runs_of(compute_full, compute_cached, load)
    if len(runs) <= 1:
        return plan  # for equal blocks the best prefix is the best subset
    best = finish_time(plan, compute_full, compute_cached, load)
    rest = _Rest(compute_full, compute_cached, load)
    loaded = done = np.zeros(1)
    choices: list[tuple[_Integers, _Integers]] = []  # per run and pair kept: the pair before it, blocks in full
    start = 0
    for run in runs:
        promising = rest.promising(start, loaded, done, best).nonzero()[0]
        if not len(promising):
            return plan
        all_loaded, all_done = run.after(loaded[promising], done[promising])
        kept = _unbeaten(all_loaded, all_done)
        loaded, done = all_loaded[kept], all_done[kept]
        choices.append((promising[kept // (run.number + 1)], kept % (run.number + 1)))
        start += run.number
    return _follow(choices, runs, int(done.argmin())) if done.min() < best else plan


class _Run(NamedTuple):
    """So many equal blocks in a row."""

    full: float
    cached: float
    load: float
    number: int

    def after(self, loaded: _Vector, done: _Vector) -> tuple[_Vector, _Vector]:
        """The pairs after the run, from each pair before it with 0..number blocks in full, as flat arrays.

        With k in full and m = number - k cached, no order ends before the longest of: all computing; the first load and
        all cached computing; all loads and the last computing. Full blocks first reach that.
        """
        in_full = np.arange(self.number + 1)
        cached = self.number - in_full
        computing = in_full * self.full + cached * self.cached
        waiting = np.maximum(self.load + cached * self.cached, cached * self.load + self.cached)
        waiting[-1] = -np.inf  # none is cached
        loaded, done = loaded[:, None], done[:, None]
        return (loaded + cached * self.load).ravel(), np.maximum(done + computing, loaded + waiting).ravel()


def _runs_of(compute_full: Times, compute_cached: Times, load: Times) -> list[_Run]:
    blocks = zip(compute_full, compute_cached, load, strict=True)
    return [_Run(*times, len(list(equal))) for times, equal in groupby(blocks)]


def _follow(choices: Sequence[tuple[_Integers, _Integers]], runs: Sequence[_Run], last: int) -> tuple[bool, ...]:
    """The plan that led to pair number `last` of the last run."""
    plan: tuple[bool, ...] = ()
    for (before, in_full), run in zip(reversed(choices), reversed(runs), strict=True):
        plan = prefix_of(int(in_full[last]), run.number) + plan
        last = int(before[last])
    return plan


class _Rest:
    """What the blocks from each one on need at least."""

    def __init__(self, compute_full: Times, compute_cached: Times, load: Times) -> None:
        shortest = [min(pair) for pair in zip(compute_full, compute_cached, strict=True)]
        savings = [full - active for full, active in zip(compute_full, compute_cached, strict=True)]
        self._shortest = _from_each(shortest, lambda total, value: total + value)
        self._full = _from_each(compute_full, lambda total, value: total + value)
        self._saving = _from_each(savings, max)
        self._cached = _from_each(compute_cached, min)
        self._load = _from_each(load, min)

    def promising(self, block: int, loaded: _Vector, done: _Vector, best: float) -> npt.NDArray[np.bool_]:
        """From which pairs before `block` the end may come before `best`.

        To make good what full blocks would take beyond `best`, some blocks must be cached: at least that time divided
        by the largest saving. Their loads take at least the shortest one each, and the last of them is then computed.
        """
        saving, load, latest = self._saving[block], self._load[block], best - self._cached[block]
        excess = done + (self._full[block] - best)
        if saving <= 0:
            return excess < 0
        soon = done < best - self._shortest[block]
        return soon & ((excess < 0) | (loaded + np.maximum(load, excess * (load / saving)) < latest))


def _from_each(values: Times, combine: Callable[[float, float], float]) -> list[float]:
    """Element i combines all values from i on."""
    return list(accumulate(reversed(values), combine))[::-1]


def _unbeaten(loaded: _Vector, done: _Vector) -> _Integers:
    """Indices of the pairs that no other one beats, or equals, in both times; by rising end of loads."""
    order = np.lexsort((done, loaded))
    ordered = done[order]
    soonest = np.minimum.accumulate(ordered)
    is_first = np.ones(len(order), bool)
    is_first[1:] = ordered[1:] < soonest[:-1]
    return order[is_first]
