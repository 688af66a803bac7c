"""Orders of the activation cache to workers (copy, forget, delete), collected until the next plan takes them along."""

from __future__ import annotations

from core.messages.worker import PageCopy, PageForget
from core.scheduling.node_cache import CacheOrders


class PendingOrders:
    """The orders issued since the last `take`."""

    def __init__(self, *, has_disk: bool) -> None:
        """has_disk: without it there are no files, and delete orders are ignored."""
        self.copies: list[PageCopy] = []
        self._forget: list[PageForget] = []
        self._delete: list[str] = []
        self._has_disk = has_disk

    def copy(self, order: PageCopy) -> None:
        """Copy an entry one tier up or down."""
        self.copies.append(order)

    def forget(self, key: str, rank: int) -> None:
        """Drop an entry from a rank's device memory, and what the rank remembers of its failed loads."""
        self._forget.append(PageForget(key, rank))

    def delete(self, key: str) -> None:
        """Delete the file of an entry, or all files of a template."""
        if self._has_disk:
            self._delete.append(key)

    def take(self) -> CacheOrders:
        """Return and clear all orders."""
        orders = CacheOrders(tuple(self.copies), tuple(self._forget), tuple(self._delete))
        self.copies.clear()
        self._forget.clear()
        self._delete.clear()
        return orders
