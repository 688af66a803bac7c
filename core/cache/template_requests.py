"""TemplateRequests: templates that somebody wants primed and kept, each answered exactly once.

A registration holds its template's pages as an edit does, until they are all there; it denoises nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.cache.page_reservations import PageReservations
from core.cache.reservation import Reservation
from core.failure import Failure
from core.messages.engine import Aborted, Failed, TemplatePrimed

Ending = TemplatePrimed | Failed | Aborted


class TemplateRequests:
    """Owned by one scheduler."""

    def __init__(self, pages: PageReservations) -> None:
        self._pages = pages
        self._reservations: dict[str, Reservation] = {}  # request id -> what it needs
        self._failures: dict[str, Failure | None] = {}  # request id -> why it ends early, None if it was given up

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._reservations

    def __len__(self) -> int:
        return len(self._reservations)

    def reservations(self) -> Iterator[Reservation]:
        """Oldest first."""
        return iter(self._reservations.values())

    def wanting_room(self, *, is_idle: bool) -> list[Reservation]:
        """Those that hold nothing yet, oldest first; idle work, one at a time, only where nothing else is to be done:
        what waits long must not keep room from edits.
        """
        idle_work = [reservation for reservation in self._reservations.values() if reservation.is_idle_work]
        urgent = [
            reservation
            for reservation in self._reservations.values()
            if not reservation.is_idle_work and not reservation.is_reserved
        ]
        may_idle = is_idle and not urgent and not any(reservation.is_reserved for reservation in idle_work)
        return idle_work[:1] if may_idle else urgent

    def yield_room(self) -> bool:
        """Have idle work let go what it holds, to take it up again later; whether there was any."""
        holding = [
            reservation
            for reservation in self._reservations.values()
            if reservation.is_idle_work and reservation.is_reserved
        ]
        for reservation in holding:
            self._pages.release(reservation)
        return bool(holding)

    def add(self, reservation: Reservation) -> None:
        self._reservations[reservation.owner_id] = reservation

    def give_up(self, request_id: str) -> None:
        """Its asker has gone."""
        self._failures.setdefault(request_id, None)

    def fail(self, request_id: str, failure: Failure) -> None:
        self._failures.setdefault(request_id, failure)

    def take_answers(self) -> list[Ending]:
        """Answers to those that are primed, failed or given up, unless a worker still reads their pixels."""
        ended = [
            (reservation, ending)
            for reservation in self._reservations.values()
            if (ending := self._ending(reservation)) and not reservation.is_read
        ]
        for reservation, ending in ended:
            del self._reservations[reservation.owner_id]
            self._failures.pop(reservation.owner_id, None)
            if isinstance(ending, TemplatePrimed):
                self._pages.cache.register(reservation.entry_keys())
            self._pages.release(reservation)
        return [ending for _, ending in ended]

    def _ending(self, reservation: Reservation) -> Ending | None:
        if reservation.owner_id in self._failures:
            failure = self._failures[reservation.owner_id]
            return Failed(reservation.owner_id, failure) if failure else Aborted(reservation.owner_id)
        if not reservation.is_complete:
            return None
        nbytes = sum(want.nbytes for want in reservation.wants())
        return TemplatePrimed(request_id=reservation.owner_id, nbytes=nbytes, ms=reservation.prime_seconds * 1e3)
