"""Decides which waiting requests leave a full queue to a new one, so that owners share its places fairly.

An owner that holds fewer places takes some of one that holds more, until both hold as many. Between owners the class
of a request does not count: each client chooses its own. Within an owner a higher class takes places of lower ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Holder(Protocol):
    """What takes places in the queue."""

    @property
    def owner(self) -> str: ...
    @property
    def num_images(self) -> int:
        """Places that it takes."""

    @property
    def priority(self) -> float:
        """Its class; lower is more urgent."""

    @property
    def arrival(self) -> float:
        """Seconds; of all holders on one clock."""

    @property
    def can_be_displaced(self) -> bool:
        """Whether it may leave: no work of it has begun."""


H = TypeVar("H", bound=Holder)


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What asks for places in the queue. priority: its class; lower is more urgent."""

    owner: str
    num_images: int
    priority: float


def displaced_by(newcomer: Newcomer, holders: Collection[H], num_missing: int) -> list[H] | None:
    """The holders that leave the queue, so that at least `num_missing` places become free; None if too few may.

    They are chosen one by one: of the owner that holds most the lowest class, of that the latest. Of the newcomer's own
    owner only lower classes leave; of another one only as long as it then holds no fewer places than the newcomer's
    owner does, the newcomer's included.
    """
    held = Counter({newcomer.owner: newcomer.num_images})  # owner -> places once the newcomer is admitted
    for holder in holders:
        held[holder.owner] += holder.num_images
    waiting = [holder for holder in holders if _can_leave(holder, newcomer)]
    leaving: list[H] = []
    while num_missing > 0:
        candidates = [holder for holder in waiting if _is_fair(holder, newcomer, held)]
        if not candidates:
            return None
        last = max(candidates, key=lambda holder: (held[holder.owner], holder.priority, holder.arrival))
        waiting.remove(last)
        leaving.append(last)
        held[last.owner] -= last.num_images
        num_missing -= last.num_images
    return leaving


def _can_leave(holder: Holder, newcomer: Newcomer) -> bool:
    is_below = holder.owner != newcomer.owner or holder.priority > newcomer.priority
    return is_below and holder.can_be_displaced


def _is_fair(holder: Holder, newcomer: Newcomer, held: Counter[str]) -> bool:
    """Whether its owner would hold no fewer places than the newcomer's without it."""
    return holder.owner == newcomer.owner or held[holder.owner] - holder.num_images >= held[newcomer.owner]
