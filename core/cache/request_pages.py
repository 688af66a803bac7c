"""RequestPages: what the activation cache knows of one mask-aware request."""

from __future__ import annotations

from dataclasses import dataclass

from core.cache.reservation import Reservation


@dataclass(slots=True)
class RequestPages:
    """Written by the ActivationCache and its RequestPrefetcher."""

    reservation: Reservation
    sigmas: tuple[float, ...] = ()  # noise levels from the first step to 0; () until its image is encoded
    full_blocks: tuple[int, ...] = ()  # blocks that its last dispatched step computes without pages
    most_full_blocks: int = 0  # most blocks that one of its finished mask-aware steps computed in full

    @property
    def must_restart(self) -> bool:
        """Whether the request must begin again: it computed blocks in full instead of waiting for their pages, and some
        of these pages then had to be primed. The picture of a request that primes must be the one that its pages give,
        however early a missing or damaged file is noticed.
        """
        return self.most_full_blocks > 0 and self.reservation.is_primed
