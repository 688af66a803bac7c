"""ImageBacklog: the image work of all that was let in, and how much of it goes before a newcomer's.

It counts what has yet to come, too: the results of edits that still make their steps are no jobs yet, and will be.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """What an edit has left. due: as `core.scheduling.fair_queue.counts_as_due`. seconds: of one processor."""

    owner: str
    priority: int
    due: float
    seconds: float


class ImageBacklog:
    """By the id of the edit."""

    def __init__(self) -> None:
        self._shares: dict[str, Share] = {}

    def __bool__(self) -> bool:
        return bool(self._shares)

    def set(self, edit_id: str, share: Share) -> None:
        """What is left of an edit's image work now; none: it is forgotten."""
        if share.seconds > 0:
            self._shares[edit_id] = share
        else:
            self.drop(edit_id)

    def drop(self, edit_id: str) -> None:
        """It has none left, or nobody wants it any more."""
        self._shares.pop(edit_id, None)

    @property
    def seconds(self) -> float:
        """Of one processor, for all of it."""
        return sum(share.seconds for share in self._shares.values())

    def before(self, newcomer: Share) -> float:
        """Seconds of one processor that go before the end of a newcomer's work, its own not counted: what its owner
        wants and is due earlier, and of each other owner everything of higher classes, and of its own class at most as
        much as its own owner gets by then (`core.scheduling.fair_queue`).
        """
        own = sum(share.seconds for share in self._of(newcomer.owner) if share.due <= newcomer.due)
        return own + sum(
            self._before(owner, newcomer.priority, own + newcomer.seconds)
            for owner in {share.owner for share in self._shares.values()} - {newcomer.owner}
        )

    def _before(self, owner: str, priority: int, limit: float) -> float:
        higher = sum(share.seconds for share in self._of(owner) if share.priority < priority)
        equal = sum(share.seconds for share in self._of(owner) if share.priority == priority)
        return higher + min(equal, limit)

    def _of(self, owner: str) -> list[Share]:
        return [share for share in self._shares.values() if share.owner == owner]
