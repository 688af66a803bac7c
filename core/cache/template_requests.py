"""TemplateRequests: requests to prime a template and keep its pages, each answered exactly once.

A template request reserves its template's pages as an edit does, until all of them are primed; it denoises nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from core.cache.page_reservations import PageReservations
from core.cache.priming import TemplateInfo
from core.cache.reservation import Reservation
from core.failure import Failure
from core.messages.engine import Aborted, Failed, PrimeTemplate, TemplatePrimed
from core.model_info import ModelInfo

Ending = TemplatePrimed | Failed | Aborted


class TemplateRequests(Collection[str]):
    """The template requests of one scheduler; as a collection, their ids."""

    def __init__(self, pages: PageReservations) -> None:
        self._pages = pages
        self._reservations: dict[str, Reservation] = {}  # request id -> its reservation
        self._arrivals: dict[str, float] = {}  # request id -> when it came, monotonic seconds
        self._failures: dict[str, Failure | None] = {}  # request id -> why it ends early; None: aborted

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._reservations

    def __len__(self) -> int:
        return len(self._reservations)

    def __iter__(self) -> Iterator[str]:
        """Oldest first."""
        return iter(self._reservations)

    def wanting_room(self, *, is_idle: bool) -> list[Reservation]:
        """Reservations to be made now, oldest first. Idle work comes one at a time, and only if there is no other work:
        it may take long, and must not keep room from edits.
        """
        idle_work = [reservation for reservation in self._reservations.values() if reservation.is_idle_work]
        urgent = [
            reservation
            for reservation in self._reservations.values()
            if not reservation.is_idle_work and not reservation.is_reserved
        ]
        may_idle = is_idle and not urgent and not any(reservation.is_reserved for reservation in idle_work)
        return idle_work[:1] if may_idle else urgent

    def wanted_models(self) -> dict[str, float]:
        """Model -> when the first of its requests came, monotonic seconds, but for idle work."""
        arrivals: dict[str, float] = {}
        for request_id, reservation in self._reservations.items():
            if not reservation.is_idle_work:
                arrivals.setdefault(reservation.template.model, self._arrivals[request_id])
        return arrivals

    def yield_room(self) -> bool:
        """Release the reservations of idle work, which will be made again later; whether there were any."""
        holding = [
            reservation
            for reservation in self._reservations.values()
            if reservation.is_idle_work and reservation.is_reserved
        ]
        for reservation in holding:
            self._pages.release(reservation)
        return bool(holding)

    def add(self, prime: PrimeTemplate, info: ModelInfo) -> None:
        """Add a request. info: of its model, which must have a page scheme."""
        template = TemplateInfo.of(prime, info)
        reservation = Reservation(prime.request_id, template, (prime.template,), template.scheme.keyframes)
        reservation.is_idle_work, reservation.owner = prime.is_idle_work, prime.owner
        self._reservations[reservation.owner_id] = reservation
        self._arrivals[reservation.owner_id] = prime.arrival

    def give_up(self, request_id: str) -> None:
        """Abort a request."""
        self._failures.setdefault(request_id, None)

    def fail(self, request_id: str, failure: Failure) -> None:
        self._failures.setdefault(request_id, failure)

    def fail_models(self, failures: Mapping[str, Failure], owner: str | None) -> None:
        """Fail the requests of these models and this owner. failures: model -> why. owner: None: of all."""
        for reservation in self._reservations.values():
            failure = failures.get(reservation.template.model) if owner in (None, reservation.owner) else None
            if failure is not None:
                self.fail(reservation.owner_id, failure)

    def take_answers(self) -> list[Ending]:
        """Answers to the requests that are primed, failed or aborted, except while a worker reads their pixels."""
        ended = [
            (reservation, ending)
            for reservation in self._reservations.values()
            if (ending := self._ending(reservation)) and not reservation.is_read
        ]
        for reservation, ending in ended:
            del self._reservations[reservation.owner_id]
            del self._arrivals[reservation.owner_id]
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
