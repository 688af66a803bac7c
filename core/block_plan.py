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
from itertools import accumulate

Times = Sequence[float]

_State = tuple[float, float, int]
"""After some blocks: when their loads end, when their computing ends, and which of them are cached, as bits."""


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

    Exact. With equal loads there are at most as many pairs as blocks before; with loads all different this is a
    knapsack problem and their number may grow much faster. Pairs that cannot beat the best plan known are dropped. For
    equal blocks the best prefix is the best subset.
    """
    num_blocks = len(load)
    plan = prefix_of(plan_prefix(compute_full, compute_cached, load), num_blocks)
    if len(set(zip(compute_full, compute_cached, load, strict=True))) <= 1:
        return plan
    best = finish_time(plan, compute_full, compute_cached, load)
    rest = _Rest(compute_full, compute_cached, load)
    states: list[_State] = [(0.0, 0.0, 0)]
    for block in range(num_blocks):
        states = rest.promising(block, states, best)
        if not states:
            return plan
        full, active, loading, bit = compute_full[block], compute_cached[block], load[block], 1 << block
        computed = [(loaded, done + full, cached) for loaded, done, cached in states]
        used = [
            (loaded + loading, max(loaded + loading, done) + active, cached | bit) for loaded, done, cached in states
        ]
        states = _unbeaten(computed + used)
    _, end, cached = min(states, key=lambda state: state[1])
    return tuple(bool(cached >> block & 1) for block in range(num_blocks)) if end < best else plan


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

    def promising(self, block: int, states: Sequence[_State], best: float) -> list[_State]:
        """Those before `block` from which the end may come before `best`.

        To make good what full blocks would take beyond `best`, some blocks must be cached: at least that time divided
        by the largest saving. Their loads take at least the shortest one each, and the last of them is then computed.
        """
        saving, load, latest = self._saving[block], self._load[block], best - self._cached[block]
        excess, soonest = self._full[block] - best, best - self._shortest[block]
        if saving <= 0:
            return [state for state in states if state[1] + excess < 0]
        loads = load / saving
        return [
            state
            for state in states
            if state[1] < soonest
            and (state[1] + excess < 0 or state[0] + max(load, (state[1] + excess) * loads) < latest)
        ]


def _from_each(values: Times, combine: Callable[[float, float], float]) -> list[float]:
    """Element i combines all values from i on."""
    return list(accumulate(reversed(values), combine))[::-1]


def _unbeaten(states: list[_State]) -> list[_State]:
    """Without those that another one beats, or equals, in both times; by rising end of loads."""
    states.sort()
    kept, soonest = [], float("inf")
    for state in states:
        if state[1] < soonest:
            kept.append(state)
            soonest = state[1]
    return kept
