"""RankSets: which sets of ranks may compute steps together, where only some ranks have a model."""

from __future__ import annotations

from collections import Counter

from core.handles import RankIds

MOST_OF_RANK = 8
"""Most sets of a rank beside those that buddies are. Which ranks have a model changes for as long as an engine serves,
and a rank keeps a process group, and its device's memory, for each set that it was ever in.
"""


class RankSets:
    """Those of one policy that have been used."""

    def __init__(self) -> None:
        self._known: set[RankIds] = set()
        self._num_of = Counter[int]()  # rank -> known sets that it is in

    def note(self, ranks: RankIds) -> None:
        """Note that these ranks compute steps together."""
        if not _are_buddies(ranks) and ranks not in self._known:
            self._known.add(ranks)
            self._num_of.update(ranks)

    def allow(self, ranks: RankIds) -> bool:
        """Whether these ranks may do that."""
        return _are_buddies(ranks) or ranks in self._known or all(self._num_of[each] < MOST_OF_RANK for each in ranks)


def _are_buddies(ranks: RankIds) -> bool:
    """Whether ranks are one of the sets that `Buddies` makes where all ranks have a model."""
    return len(ranks) == 1 or (ranks[0] % len(ranks) == 0 and ranks[-1] - ranks[0] == len(ranks) - 1)
