"""The messages that a scheduler sends to clients about their requests."""

from __future__ import annotations

from core.messages.engine import Aborted, Failed, Finished, PartialImage, TemplatePrimed
from core.scheduling.request import Request

Output = PartialImage | Finished | TemplatePrimed | Failed | Aborted


def finished(request: Request) -> Finished:
    """The terminal message of a request whose last node is done."""
    assert request.started is not None
    reservation = request.reservation
    ms = {"queue": (request.started - request.head.arrival) * 1e3}
    ms |= {part: seconds * 1e3 for part, seconds in request.part_seconds.items()}
    ms["prime"] = reservation.prime_seconds * 1e3 if reservation else 0.0
    return Finished(
        request_id=request.id,
        ms=ms,
        text_tokens=request.text_tokens,
        prompt_truncated=request.prompt_truncated,
        cache=reservation.result if reservation else "off",
        tier=reservation.tier if reservation and not reservation.is_primed else None,
        is_primed=reservation is not None and reservation.is_primed,
        full_blocks=request.full_blocks,
    )
