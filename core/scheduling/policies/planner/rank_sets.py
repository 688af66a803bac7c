"""RankSets: which sets of ranks may compute steps together, where only some ranks have a model."""

from __future__ import annotations

from core.handles import RankIds

MOST_OF_RANK = 8
"""Most sets of a rank beside those that buddies are. Which ranks have a model changes for as long as an engine serves,
and a rank keeps a process group, and its device's memory, for each set that it was ever in.
"""


class RankSets:
    """Those of one policy that have been used."""

    def __init__(self) -> None:
        self._known: dict[int, set[RankIds]] = {}  # live rank -> the sets that it was in, beside those of buddies

    def note(self, ranks: RankIds) -> None:
        """Note that these ranks compute steps together."""
        if not _are_buddies(ranks):
            for each in ranks:
                self._known.setdefault(each, set()).add(ranks)

    def note_live(self, ranks: RankIds) -> None:
        """Note which ranks live. One that is restarted begins without groups; those that were with it keep theirs."""
        self._known = {rank: known for rank, known in self._known.items() if rank in ranks}

    def allow(self, ranks: RankIds) -> bool:
        """Whether these ranks may do that."""
        return _are_buddies(ranks) or all(self._has_room(each, ranks) for each in ranks)

    def _has_room(self, rank: int, ranks: RankIds) -> bool:
        known = self._known.get(rank, ())
        return ranks in known or len(known) < MOST_OF_RANK


def _are_buddies(ranks: RankIds) -> bool:
    """Whether ranks are one of the sets that `Buddies` makes where all ranks have a model."""
    return len(ranks) == 1 or (ranks[0] % len(ranks) == 0 and ranks[-1] - ranks[0] == len(ranks) - 1)
