"""ImageBacklog: the image work left of all admitted edits, and how much of it goes before that of a new one.

Future work counts too: the results of edits that are still being denoised are not jobs yet, but will be.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BacklogShare:
    """The image work that is left for one edit: its share of the backlog."""

    owner: str
    priority: int
    due: float  # see `core.scheduling.requests.fair_queue.counts_as_due`
    seconds: float  # of one image processor


class ImageBacklog:
    """Shares by edit id."""

    def __init__(self) -> None:
        self._shares: dict[str, BacklogShare] = {}

    def __bool__(self) -> bool:
        return bool(self._shares)

    def set(self, edit_id: str, share: BacklogShare) -> None:
        """Set what is left of an edit's image work; a share of 0 seconds is dropped."""
        if share.seconds > 0:
            self._shares[edit_id] = share
        else:
            self.drop(edit_id)

    def drop(self, edit_id: str) -> None:
        """Remove an edit that has no image work left or was given up."""
        self._shares.pop(edit_id, None)

    @property
    def seconds(self) -> float:
        """Seconds of one image processor for all of it."""
        return sum(share.seconds for share in self._shares.values())

    def before(self, newcomer: BacklogShare) -> float:
        """Seconds of one image processor spent on other work before a new edit's is done: its owner's work that is due
        earlier, and of each other owner all work of higher classes and, of its own class, at most as much as its own
        owner gets by then (`core.scheduling.requests.fair_queue`).
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

    def _of(self, owner: str) -> list[BacklogShare]:
        return [share for share in self._shares.values() if share.owner == owner]
