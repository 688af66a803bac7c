"""ResultBudget: how many bytes of results may lie in memory before their clients have them.

A result is kept until its edit is over, since a client wants all of them in one answer, and may read it slowly. So a
result is begun only where there is room for it, and otherwise waits its turn. What an edit has begun must come to an
end some time, however full the memory is: the oldest edit of all is never held up, nor the oldest of an owner for the
sake of that owner's own share.

An owner that holds more than its share, because its oldest edit alone needs more, takes no more than the share from the
others.
"""

from __future__ import annotations


class ResultBudget:
    """Edits join with their first result and leave when their memory is free; in between they hold bytes."""

    def __init__(self, total: int, per_owner: int) -> None:
        """Bytes, of all owners and of each."""
        self.total = total
        self.per_owner = per_owner
        self._owner_of: dict[str, str] = {}  # edit id -> owner, the oldest edit first
        self._held: dict[str, dict[str, int]] = {}  # owner -> its edits, the oldest first -> bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all results."""
        return sum(map(self._held_by, self._held))

    def join(self, edit_id: str, owner: str) -> None:
        """The edit will want results. Nothing happens where it has joined already."""
        if edit_id not in self._owner_of:
            self._owner_of[edit_id] = owner
            self._held.setdefault(owner, {})[edit_id] = 0

    def has_room(self, edit_id: str, nbytes: int) -> bool:
        """Whether the edit may take so much more now."""
        owner = self._owner_of[edit_id]
        if edit_id == next(iter(self._owner_of)):
            return True
        wanted = self._held_by(owner) + nbytes
        if wanted > self.per_owner and edit_id != next(iter(self._held[owner])):
            return False
        others = sum(min(self._held_by(other), self.per_owner) for other in self._held if other != owner)
        return others + min(wanted, self.per_owner) <= self.total

    def take(self, edit_id: str, nbytes: int) -> None:
        """The edit holds so much more; less, if negative."""
        self._held[self._owner_of[edit_id]][edit_id] += nbytes

    def leave(self, edit_id: str) -> None:
        """All that the edit held is free. Nothing happens where it never joined."""
        owner = self._owner_of.pop(edit_id, None)
        if owner is not None:
            del self._held[owner][edit_id]
            if not self._held[owner]:
                del self._held[owner]

    def _held_by(self, owner: str) -> int:
        return sum(self._held[owner].values())
