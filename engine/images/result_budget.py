"""ResultBudget: limits the bytes of finished results that wait in memory for their clients.

An edit's results are kept until the edit is over: the client gets all of them in one answer, and may read it slowly.
So a result is started only when there is room for it. To guarantee progress, the oldest edit is never blocked, and the
oldest edit of an owner is never blocked by that owner's own share.

An owner may exceed its share when its oldest edit alone needs more; only the share then counts against the others.
"""

from __future__ import annotations


class ResultBudget:
    """Bytes by edit. An edit joins before its first result and leaves when its memory is free."""

    def __init__(self, total: int, per_owner: int) -> None:
        """total: limit in bytes of all owners together; per_owner: of each."""
        self.total = total
        self.per_owner = per_owner
        self._owner_of: dict[str, str] = {}  # edit id -> owner, the oldest edit first
        self._held: dict[str, dict[str, int]] = {}  # owner -> its edits, the oldest first -> bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all results."""
        return sum(map(self._held_by, self._held))

    def join(self, edit_id: str, owner: str) -> None:
        """Register an edit that will have results; no effect if it has joined already."""
        if edit_id not in self._owner_of:
            self._owner_of[edit_id] = owner
            self._held.setdefault(owner, {})[edit_id] = 0

    def has_room(self, edit_id: str, nbytes: int) -> bool:
        """Whether the edit may take `nbytes` more now."""
        owner = self._owner_of[edit_id]
        if edit_id == next(iter(self._owner_of)):
            return True
        wanted = self._held_by(owner) + nbytes
        if wanted > self.per_owner and edit_id != next(iter(self._held[owner])):
            return False
        others = sum(min(self._held_by(other), self.per_owner) for other in self._held if other != owner)
        return others + min(wanted, self.per_owner) <= self.total

    def take(self, edit_id: str, nbytes: int) -> None:
        """Add `nbytes`, which may be negative, to what the edit holds."""
        self._held[self._owner_of[edit_id]][edit_id] += nbytes

    def leave(self, edit_id: str) -> None:
        """Release all that the edit held; no effect if it never joined."""
        owner = self._owner_of.pop(edit_id, None)
        if owner is not None:
            del self._held[owner][edit_id]
            if not self._held[owner]:
                del self._held[owner]

    def _held_by(self, owner: str) -> int:
        return sum(self._held[owner].values())
