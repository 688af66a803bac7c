"""Block plans: which blocks to compute in full while the pages of the others are still being loaded.

One step runs a model's blocks in order. For each block the choice is: compute all tokens and load nothing, or load the
block's pages and compute the active tokens. Loads run in parallel with computing, one after the other in block order,
from the start of the step (FlashPS, section 4.2 and figure 9):

    loading      | pages 2  | pages 3  | pages 4  |
    computing    | block 0 in full | block 1 in full | 2 | 3 | 4 |

Only leading blocks are computed in full. Pages of keys and values allow nothing else: the hidden states of inactive
tokens are lost at the first cached block. Pages of block outputs would, but other choices were measured and gain
nothing (docs/mask_aware.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from core.model_info import BlockRun

Times = Sequence[float]
"""By block, all in one unit."""


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


def plan_blocks(
    block_runs: Sequence[BlockRun], num_pages: int, full: float, cached: float, load: float
) -> tuple[int, ...]:
    """The pages of the leading blocks that are computed in full so that a step ends soonest. block_runs: () for a model
    of equal blocks with a page each. full, cached, load: seconds of all blocks."""
    if not block_runs:
        return tuple(range(plan_prefix(*([seconds / num_pages] * num_pages for seconds in (full, cached, load)))))
    blocks = [run for run in block_runs for _ in range(run.number)]
    num_full = plan_prefix(
        [full * block.work for block in blocks],
        [cached * block.work for block in blocks],
        [load * block.pages / num_pages for block in blocks],
    )
    return tuple(range(sum(block.pages for block in blocks[:num_full])))
