"""The messages that an engine sends to clients about their requests."""

from __future__ import annotations

from core.messages.engine import Aborted, AdapterAdded, Failed, Finished, PartialImage, TemplatePrimed
from core.scheduling.node_cache import CacheOutcome
from core.scheduling.request import Request

Output = PartialImage | Finished | TemplatePrimed | AdapterAdded | Failed | Aborted


def finished(request: Request, cache: CacheOutcome) -> Finished:
    """The terminal message of a request whose last node is done. cache: what the cache has done for it."""
    assert request.started is not None
    assert request.made is not None
    ms = {"queue": (request.started - request.head.arrival) * 1e3}
    ms |= {part: seconds * 1e3 for part, seconds in request.part_seconds.items()}
    ms["prime"] = cache.prime_seconds * 1e3
    return Finished(
        request_id=request.id,
        ms=ms,
        text_tokens=request.text_tokens,
        prompt_truncated=request.prompt_truncated,
        cache=cache.result,
        tier=cache.tier,
        is_primed=cache.result == "miss",
        full_blocks=cache.full_blocks,
        made=request.made,
        degrees=tuple(request.degrees.values()),
    )
