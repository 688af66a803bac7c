"""What clients are told of their requests."""

from __future__ import annotations

from core.messages.engine import Aborted, Failed, Finished, PartialImage, TemplatePrimed
from core.scheduling.request import Request

Output = PartialImage | Finished | TemplatePrimed | Failed | Aborted


def finished(request: Request) -> Finished:
    """Of one whose last node is done."""
    assert request.started is not None
    hold = request.hold
    ms = {"queue": (request.started - request.edit.arrival) * 1e3}
    ms |= {stage: seconds * 1e3 for stage, seconds in request.stage_seconds.items()}
    ms["prime"] = hold.prime_seconds * 1e3 if hold else 0.0
    return Finished(
        request_id=request.id,
        ms=ms,
        text_tokens=request.text_tokens,
        prompt_truncated=request.prompt_truncated,
        cache=hold.result if hold else "off",
        tier=hold.tier if hold and not hold.is_primed else None,
        is_primed=hold is not None and hold.is_primed,
        full_blocks=request.full_blocks,
    )
