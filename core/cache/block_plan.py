"""Block plans: which blocks to compute in full while the pages of the others are still being loaded.

One step runs a model's blocks in order. For each block the choice is: compute all tokens and load nothing, or load the
block's pages and compute the active tokens. Loads run in parallel with computing, one after the other in block order,
from the start of the step (FlashPS, section 4.2 and figure 9):

    loading      | pages 2  | pages 3  | pages 4  |
    computing    | block 0 in full | block 1 in full | 2 | 3 | 4 |

All times are in the same unit, by block. Pages of keys and values allow only a prefix of full blocks, since the first
cached block does not compute the inactive tokens' hidden states. A family that caches the outputs of blocks may use any
subset. There a block's output may fill several pages, and the rest of Stencil calls each of these pages a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Times = Sequence[float]

_Vector = npt.NDArray[np.float64]
_Integers = npt.NDArray[np.intp]


def finish_time(cached: Sequence[bool], compute_full: Times, compute_cached: Times, load: Times) -> float:
    """Time at which the last block is done. cached: whether each block uses its pages."""
    loaded = done = 0.0
    for is_cached, full, active, loading in zip(cached, compute_full, compute_cached, load, strict=True):
        if is_cached:
            loaded += loading
            done = max(loaded, done) + active
        else:
            done += full
    return done


def plan_prefix(compute_full: Times, compute_cached: Times, load: Times) -> int:
    """Number of leading blocks to compute in full so that the step ends soonest, the least among equals. O(blocks).

    With the first p blocks in full, the step's time is the maximum of: all computing without waits and, for every
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
    """Whether each block is cached, if the first `num_full` are computed in full."""
    return (False,) * num_full + (True,) * (num_blocks - num_full)


def algorithm_1(compute_full: Times, compute_cached: Times, load: Times) -> tuple[bool, ...]:
    """The rule of FlashPS (section 4.2, Algorithm 1), for comparison: block after block, use the pages if the block
    then ends no later than computed in full. The paper's blocks are equal; here they need not be."""
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


class BlockRun(msgspec.Struct, frozen=True):
    """Equal consecutive blocks of a model that caches their outputs."""

    number: int  # of blocks
    pages: int  # of each block
    work: float  # of each block, as a share of all blocks' work (0..1)


def plan_blocks(
    block_runs: Sequence[BlockRun], num_pages: int, full: float, cached: float, load: float
) -> tuple[int, ...]:
    """The pages, ascending, of the blocks to compute in full so that a step ends soonest. block_runs: () for a model of
    equal blocks with one page each, of which only leading ones may be in full. full, cached, load: seconds of all
    blocks together."""
    if not block_runs:
        blocks = ([seconds / num_pages] * num_pages for seconds in (full, cached, load))
        return tuple(range(plan_prefix(*blocks)))
    runs = [Run(full * run.work, cached * run.work, load * run.pages / num_pages, run.number) for run in block_runs]
    chosen: list[int] = []
    first = 0  # page of the run
    for run, in_full in zip(block_runs, plan_subset(runs), strict=True):
        chosen += range(first, first + in_full * run.pages)
        first += run.number * run.pages
    return tuple(chosen)


class Run(NamedTuple):
    """Equal consecutive blocks, with the times of one block."""

    full: float  # computing all tokens
    cached: float  # computing the active tokens
    load: float  # loading its pages
    number: int  # of blocks


def plan_subset(runs: Sequence[Run]) -> tuple[int, ...]:
    """Number of leading blocks of each run to compute in full, so that the step ends as soon as with the best subset of
    all blocks.

    Exact: within a run of equal blocks the full ones come first (see `_after`), so only their number has to be chosen.
    A dynamic program over pairs (loads end, computing ends) that keeps the pairs which may still beat the best known
    plan and are not dominated. If all blocks differ it is a knapsack problem, and the number of pairs may grow.
    """
    plan, best = _prefix_of_runs(runs)
    loaded = done = np.zeros(1)
    choices: list[tuple[_Integers, _Integers]] = []  # per run and pair kept: the pair before it, blocks in full
    for run, rest in zip(runs, _rests(runs), strict=True):
        all_loaded, all_done = _after(run, loaded, done)
        kept = _unbeaten(all_loaded, all_done, rest.may_beat(best, all_loaded, all_done))
        if not len(kept):
            return plan
        loaded, done = all_loaded[kept], all_done[kept]
        choices.append(np.divmod(kept, run.number + 1))
    return _follow(choices, int(done.argmin()))


def _prefix_of_runs(runs: Sequence[Run]) -> tuple[tuple[int, ...], float]:
    """A plan with leading runs in full, and an upper bound of its end: each run is treated as one block."""
    full, cached, load = ([run.number * run[i] for run in runs] for i in range(3))
    num_full = plan_prefix(full, cached, load)
    plan = tuple(run.number if i < num_full else 0 for i, run in enumerate(runs))
    return plan, finish_time(prefix_of(num_full, len(runs)), full, cached, load)


def _after(run: Run, loaded: _Vector, done: _Vector) -> tuple[_Vector, _Vector]:
    """The pairs after the run, for each pair before it and 0..number blocks in full, as flat arrays.

    With k blocks in full and m = number - k cached, no order ends before the maximum of: all computing; the first load
    and all cached computing; all loads and the last computing. Full blocks first attain this bound.
    """
    in_full = np.arange(run.number + 1.0)
    cached = run.number - in_full
    loading = cached * run.load
    computing = in_full * run.full + cached * run.cached
    waiting = np.maximum(run.load + cached * run.cached, loading + run.cached)
    waiting[-1] = -np.inf  # no block is cached
    all_done = np.maximum(np.add.outer(done, computing), np.add.outer(loaded, waiting))
    return np.add.outer(loaded, loading).ravel(), all_done.ravel()


def _unbeaten(loaded: _Vector, done: _Vector, is_candidate: npt.NDArray[np.bool_]) -> _Integers:
    """Indices of the candidates that no other candidate beats in both times."""
    indices = is_candidate.nonzero()[0]
    order = indices[loaded[indices].argsort()]
    ordered = done[order]
    is_first = np.ones(len(order), bool)
    np.less(ordered[1:], np.minimum.accumulate(ordered)[:-1], out=is_first[1:])
    return order[is_first]


def _follow(choices: Sequence[tuple[_Integers, _Integers]], last: int) -> tuple[int, ...]:
    """The plan that led to pair number `last` of the last run."""
    plan: list[int] = []
    for before, in_full in reversed(choices):
        plan.append(int(in_full[last]))
        last = int(before[last])
    return tuple(reversed(plan))


class _Rest(NamedTuple):
    """Lower bounds for the remaining runs."""

    full: float = 0.0  # computing all blocks in full
    shortest: float = 0.0  # computing each block the faster way
    saving: float = 0.0  # largest saving of one block by its pages
    load: float = math.inf  # shortest load of one block
    cached: float = math.inf  # shortest computing of one block with its pages

    def and_before(self, run: Run) -> _Rest:
        """The bounds with one more run."""
        return _Rest(
            self.full + run.number * run.full,
            self.shortest + run.number * min(run.full, run.cached),
            max(self.saving, run.full - run.cached),
            min(self.load, run.load),
            min(self.cached, run.cached),
        )

    def may_beat(self, best: float, loaded: _Vector, done: _Vector) -> npt.NDArray[np.bool_]:
        """Which of the pairs may lead to an end before `best`.

        The time that full blocks would take beyond `best` must be saved by caching blocks: at least that time divided
        by the largest saving. Each takes at least the shortest load, and the last of them is then computed.
        """
        if self.saving <= 0:
            return done < best - self.full
        excess = done + (self.full - best)
        may_load = loaded + np.maximum(self.load, excess * (self.load / self.saving)) < best - self.cached
        return (done < best - self.shortest) & ((excess < 0) | may_load)


def _rests(runs: Sequence[Run]) -> list[_Rest]:
    """The bounds for what is left after each run."""
    return list(accumulate(reversed(runs), _Rest.and_before, initial=_Rest()))[-2::-1]
