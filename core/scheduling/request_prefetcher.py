"""RequestPrefetcher: decides which cache entries each edit needs, from the time it waits until its last step.

Pages of waiting edits are loaded from slower tiers ahead of time. It maps the scheduler's requests to reservations;
PageReservations below it does not know requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.cache.page_reservations import PageReservations, keyframes_needed
from core.cache.priming import TemplateInfo
from core.cache.reservation import Reservation
from core.cache.template_requests import TemplateRequests
from core.model_info import ModelInfo
from core.scheduling.request import Request, Status


class RequestPrefetcher:
    """One per scheduler; the only writer of Request.reservation."""

    def __init__(
        self,
        models: Mapping[str, ModelInfo],
        pages: PageReservations,
        template_requests: TemplateRequests,
        num_prefetched: int,
    ) -> None:
        """num_prefetched: how many waiting edits have their pages loaded ahead; 0 where there is no slower tier."""
        self._models = models
        self._pages = pages
        self._template_requests = template_requests
        self._num_prefetched = num_prefetched

    def need(self, request: Request) -> None:
        """Set the keyframes that a mask-aware edit needs, now that its noise levels are known."""
        template = self._template_of(request)
        needed = keyframes_needed(template.scheme.keyframes, _masked_sigmas(request, 0))
        if request.reservation is None:
            request.reservation = Reservation(request.id, template, request.spec.template, needed)
        else:
            self._pages.narrow(request.reservation, needed)

    def trim(self, request: Request) -> None:
        """Release the entries that the remaining steps do not read."""
        if request.reservation is not None:
            self._pages.trim(request.reservation, _masked_sigmas(request, request.progress.steps_done))

    def reserve(self, requests: Sequence[Request], *, is_idle: bool) -> None:
        """Reserve what edits need, most urgent first and without overtaking, so that none waits for room forever.
        requests: all live ones, in this order. is_idle: the scheduler holds no edit, live or ending.
        """
        for request in requests[: self._num_prefetched]:
            if request.reservation is None and request.status is Status.WAITING and request.spec.is_mask_aware:
                self._prefetch(request)
        reservations = [request.reservation for request in requests if request.reservation is not None]
        for reservation in [*reservations, *self._template_requests.wanting_room(is_idle=is_idle)]:
            if not reservation.is_reserved and not self._reserve(reservation):
                break

    def _prefetch(self, request: Request) -> None:
        """Prepare a reservation of all keyframes, since the edit's noise levels are not known yet."""
        template = self._template_of(request)
        if template.scheme.keyframes:
            request.reservation = Reservation(request.id, template, request.spec.template, template.scheme.keyframes)
            request.reservation.is_prefetch = True

    def _reserve(self, reservation: Reservation) -> bool:
        """Whether it could be reserved, if necessary after releasing what idle work holds."""
        return self._pages.reserve(reservation) or (
            self._template_requests.yield_room() and self._pages.reserve(reservation)
        )

    def _template_of(self, request: Request) -> TemplateInfo:
        return TemplateInfo.of(request.spec, self._models[request.head.model])


def _masked_sigmas(request: Request, first: int) -> tuple[float, ...]:
    """Noise levels of the mask-aware steps from `first` on."""
    return request.sigmas[max(first, request.spec.num_full_steps) : -1]
