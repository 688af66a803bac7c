"""RequestPrefetcher: what each edit needs of the activation cache, from the time it waits to its last step.

Stands between the scheduler's requests and PageReservations, which knows holds and no requests.
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
    """One per scheduler. num_prefetched: edits whose pages come up from slower tiers while they wait; 0 where there is
    no such tier. It writes Request.hold.
    """

    def __init__(
        self,
        models: Mapping[str, ModelInfo],
        pages: PageReservations,
        template_requests: TemplateRequests,
        num_prefetched: int,
    ) -> None:
        self._models = models
        self._pages = pages
        self._template_requests = template_requests
        self._num_prefetched = num_prefetched

    def need(self, request: Request) -> None:
        """Say what a mask-aware edit needs of the cache, now that its noise levels are known."""
        template = self._template_of(request)
        needed = keyframes_needed(template.scheme.keyframes, _masked_sigmas(request, 0))
        if request.reservation is None:
            request.reservation = Reservation(request.id, template, request.edit.template, needed)
        else:
            self._pages.narrow(request.reservation, needed)

    def trim(self, request: Request) -> None:
        """Let go what the steps left do not read."""
        if request.reservation is not None:
            self._pages.trim(request.reservation, _masked_sigmas(request, request.progress.steps_done))

    def reserve(self, requests: Sequence[Request], *, is_idle: bool) -> None:
        """Pin what edits need, most urgent first and without overtaking, so that none waits for room forever. requests:
        all that live, in this order. is_idle: whether there are none, nor any that still ends.
        """
        for request in requests[: self._num_prefetched]:
            if request.reservation is None and request.status is Status.WAITING and request.edit.is_mask_aware:
                self._prefetch(request)
        reservations = [request.reservation for request in requests if request.reservation is not None]
        for reservation in [*reservations, *self._template_requests.wanting_room(is_idle=is_idle)]:
            if not reservation.is_reserved and not self._reserve(reservation):
                break

    def _prefetch(self, request: Request) -> None:
        """Its noise levels are not known yet: all keyframes come."""
        template = self._template_of(request)
        if template.scheme.keyframes:
            request.reservation = Reservation(request.id, template, request.edit.template, template.scheme.keyframes)
            request.reservation.is_prefetch = True

    def _reserve(self, reservation: Reservation) -> bool:
        """Reserve what idle work has to give way for, if need be."""
        return self._pages.reserve(reservation) or (
            self._template_requests.yield_room() and self._pages.reserve(reservation)
        )

    def _template_of(self, request: Request) -> TemplateInfo:
        return TemplateInfo.of(request.edit, self._models[request.edit.model])


def _masked_sigmas(request: Request, first: int) -> tuple[float, ...]:
    """Noise levels of the mask-aware steps from `first` on."""
    return request.sigmas[max(first, request.edit.sampling.full_steps or 0) : -1]
