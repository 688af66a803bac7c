"""RequestPrefetcher: decides which cache entries each request needs, from the time it waits until its last step.

Pages of waiting requests are loaded from slower tiers ahead of time. It maps the scheduler's requests to reservations;
PageReservations below it does not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from core.cache.page_reservations import PageReservations, keyframes_needed
from core.cache.priming import TemplateInfo
from core.cache.request_pages import RequestPages
from core.cache.reservation import Reservation
from core.cache.template_requests import TemplateRequests
from core.model_info import ModelInfo
from core.scheduling.requests.live_requests import LiveRequests
from core.scheduling.requests.request import Request, Status


class RequestPrefetcher:
    """One per cache; makes and ends the records of its requests."""

    def __init__(
        self,
        models: Mapping[str, ModelInfo],
        pages: PageReservations,
        template_requests: TemplateRequests,
        num_prefetched: int,
    ) -> None:
        """num_prefetched: how many waiting requests have their pages loaded ahead; 0 where there is no slower tier."""
        self.records: dict[str, RequestPages] = {}  # request id -> what is known of it, if it uses the cache
        self._models = models
        self._pages = pages
        self._template_requests = template_requests
        self._num_prefetched = num_prefetched
        self._unreserved: set[str] = set()  # ids of requests whose reservation is not made yet

    def need(self, request: Request, sigmas: tuple[float, ...]) -> None:
        """Set the keyframes that a mask-aware request needs, now that its noise levels are known: `sigmas`, from the
        first step to 0.
        """
        template = self._template_of(request)
        needed = keyframes_needed(template.scheme.keyframes, _masked(request, sigmas, 0))
        mine = self.records.get(request.id)
        if mine is None:
            mine = self._make(request, template, needed)
        elif not mine.sigmas:  # else its image was encoded before, and it was set back
            self._pages.narrow(mine.reservation, needed)
        mine.sigmas = sigmas

    def trim(self, request: Request) -> None:
        """Release the entries that the remaining steps of a request with a record do not read."""
        mine = self.records[request.id]
        self._pages.trim(mine.reservation, _masked(request, mine.sigmas, _masked_done(request)))

    def set_back(self, request: Request, *, are_lost: bool) -> None:
        """Reserve again what the remaining steps of a request with a record read, after it was set back, unless it has
        all of it. are_lost: its pages are.
        """
        mine = self.records[request.id]
        reservation, needed = mine.reservation, mine.reservation.sigmas
        if mine.sigmas:
            keyframes = reservation.template.scheme.keyframes
            needed = keyframes_needed(keyframes, _masked(request, mine.sigmas, _masked_done(request)))
        if not are_lost and set(needed) <= set(reservation.sigmas):
            return
        self._pages.release(reservation)
        self._unreserved.add(request.id)
        reservation.sigmas = needed

    def forget(self, request: Request) -> None:
        """Release what a request that has ended holds."""
        self._unreserved.discard(request.id)
        mine = self.records.pop(request.id, None)
        if mine is not None:
            self._pages.release(mine.reservation)

    def reserve(self, requests: LiveRequests, page_rank: Callable[[str, str], int]) -> None:
        """Reserve what requests need: running ones before waiting ones, and of each the most urgent first, without
        overtaking, so that none waits for room forever. page_rank: see `NodeCache.reserve`.
        """
        for request in islice(requests.live(), self._num_prefetched):
            if request.id not in self.records and self._may_prefetch(request):
                self._prefetch(request)
        running, waiting = self._missing(requests)
        for reservation in [*running, *waiting, *self._template_requests.wanting_room(is_idle=not len(requests))]:
            if not reservation.is_reserved:
                rank = page_rank(reservation.template.key, reservation.template.model)
                room_of_others = self._yield_room(requests) if reservation in running else self._yield_idle_room()
                if not self._reserve(reservation, rank, room_of_others):
                    break
                self._unreserved.discard(reservation.owner_id)

    def waits_for_room(self, request: Request) -> bool:
        """Whether a request's reservation is wanted and not made."""
        return request.id in self._unreserved

    def _missing(self, requests: LiveRequests) -> tuple[list[Reservation], list[Reservation]]:
        """Reservations that are not made yet, of running and of waiting requests, most urgent first."""
        running, waiting, left = list[Reservation](), list[Reservation](), len(self._unreserved)
        for request in requests.in_order() if left else ():
            if request.id in self._unreserved:
                left -= 1
                if request.is_live:
                    found = waiting if request.status is Status.WAITING else running
                    found.append(self.records[request.id].reservation)
                if not left:
                    break
        return running, waiting

    @staticmethod
    def _may_prefetch(request: Request) -> bool:
        """Whether it is sure to read pages: where the mask is to be found, that depends on it."""
        return request.status is Status.WAITING and request.spec.reads_template and not request.awaits_mask

    def _prefetch(self, request: Request) -> None:
        """Prepare a reservation of all keyframes, since the request's noise levels are not known yet."""
        template = self._template_of(request)
        if template.scheme.keyframes:
            self._make(request, template, template.scheme.keyframes).reservation.is_prefetch = True

    def _make(self, request: Request, template: TemplateInfo, keyframes: tuple[float, ...]) -> RequestPages:
        spec = request.picture
        assert spec.template is not None
        reservation = Reservation(request.id, template, (spec.template, *spec.references), keyframes)
        reservation.owner = request.head.owner
        self._unreserved.add(request.id)
        mine = self.records[request.id] = RequestPages(reservation)
        return mine

    def _reserve(self, reservation: Reservation, rank: int, room_of_others: Iterator[None]) -> bool:
        """Whether it could be reserved, if necessary after others have released what they hold."""
        return self._pages.reserve(reservation, rank) or any(
            self._pages.reserve(reservation, rank) for _ in room_of_others
        )

    def _yield_idle_room(self) -> Iterator[None]:
        """Release what idle work holds, at the first step."""
        if self._template_requests.yield_room():
            yield

    def _yield_room(self, requests: LiveRequests) -> Iterator[None]:
        """Release what idle work holds, then the pages of one waiting request per step, newest first. Waiting
        requests may need a slot of those that wait for this room.
        """
        yield from self._yield_idle_room()
        for request_id, mine in reversed(self.records.items()):
            if requests[request_id].status is Status.WAITING and mine.reservation.is_reserved:
                self._pages.release(mine.reservation)
                self._unreserved.add(request_id)
                yield

    def _template_of(self, request: Request) -> TemplateInfo:
        assert request.workflow.paged is not None
        info = self._models[request.model_of(request.workflow.paged)]
        return TemplateInfo.of(request.picture, info, request.picture.reference_sizes)


def _masked(request: Request, sigmas: tuple[float, ...], first: int) -> tuple[float, ...]:
    """Noise levels of the steps from `first` on that read the template's pages."""
    return sigmas[first + request.spec.num_full_steps(first, len(sigmas) - 1) : -1]


def _masked_done(request: Request) -> int:
    """How many rounds of the node that reads pages are done."""
    paged = request.workflow.paged
    return 0 if paged is None else request.progress.done[paged.name]
