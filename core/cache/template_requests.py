"""TemplateRequests: templates that somebody wants primed and kept, each answered exactly once.

A registration holds its template's pages as an edit does, until they are all there; it denoises nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.cache.page_reservations import PageReservations, Reservation
from core.failure import Failure
from core.messages.engine import Aborted, Failed, TemplatePrimed

Ending = TemplatePrimed | Failed | Aborted


class TemplateRequests:
    """Owned by one scheduler."""

    def __init__(self, pages: PageReservations) -> None:
        self._pages = pages
        self._holds: dict[str, Reservation] = {}  # request id -> what it needs
        self._failures: dict[str, Failure | None] = {}  # request id -> why it ends early, None if it was given up

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._holds

    def __len__(self) -> int:
        return len(self._holds)

    def holds(self) -> Iterator[Reservation]:
        """Oldest first."""
        return iter(self._holds.values())

    def wanting_room(self, *, is_idle: bool) -> list[Reservation]:
        """Those that hold nothing yet, oldest first; idle work, one at a time, only where nothing else is to be done:
        what waits long must not keep room from edits.
        """
        idle_work = [hold for hold in self._holds.values() if hold.is_idle_work]
        urgent = [hold for hold in self._holds.values() if not hold.is_idle_work and not hold.is_reserved]
        may_idle = is_idle and not urgent and not any(hold.is_reserved for hold in idle_work)
        return idle_work[:1] if may_idle else urgent

    def yield_room(self) -> bool:
        """Have idle work let go what it holds, to take it up again later; whether there was any."""
        holding = [hold for hold in self._holds.values() if hold.is_idle_work and hold.is_reserved]
        for hold in holding:
            self._pages.release(hold)
        return bool(holding)

    def add(self, hold: Reservation) -> None:
        self._holds[hold.owner_id] = hold

    def give_up(self, request_id: str) -> None:
        """Its asker has gone."""
        self._failures.setdefault(request_id, None)

    def fail(self, request_id: str, failure: Failure) -> None:
        self._failures.setdefault(request_id, failure)

    def settle(self) -> list[Ending]:
        """Answers to those that are primed, failed or given up, unless a worker still reads their pixels."""
        ended = [(hold, ending) for hold in self._holds.values() if (ending := self._ending(hold)) and not hold.is_read]
        for hold, ending in ended:
            del self._holds[hold.owner_id]
            self._failures.pop(hold.owner_id, None)
            if isinstance(ending, TemplatePrimed):
                self._pages.cache.register(hold.entry_keys())
            self._pages.release(hold)
        return [ending for _, ending in ended]

    def _ending(self, hold: Reservation) -> Ending | None:
        if hold.owner_id in self._failures:
            failure = self._failures[hold.owner_id]
            return Failed(hold.owner_id, failure) if failure else Aborted(hold.owner_id)
        if not hold.is_complete:
            return None
        nbytes = sum(want.nbytes for want in hold.wants())
        return TemplatePrimed(request_id=hold.owner_id, nbytes=nbytes, ms=hold.prime_seconds * 1e3)
