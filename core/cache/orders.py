"""Orders of the activation cache to workers (copy, forget, delete), collected until the next plan takes them along."""

from __future__ import annotations

from core.messages.worker import PageCopy, PageForget
from core.scheduling.node_cache import CacheOrders


class PendingOrders:
    """The orders issued since the last `take`."""

    def __init__(self, *, has_disk: bool) -> None:
        """has_disk: without it there are no files, and delete orders are ignored."""
        self.copies: list[PageCopy] = []
        self.down: set[int] = set()  # ranks that have died and are not restarted yet; orders to them wait
        self._forget: list[PageForget] = []
        self._delete: list[str] = []
        self._has_disk = has_disk

    def copy(self, order: PageCopy) -> None:
        """Copy an entry one tier up or down."""
        self.copies.append(order)

    def forget(self, key: str, rank: int) -> None:
        """Drop an entry from a rank's device memory, and what the rank remembers of its failed loads."""
        if rank not in self.down:
            self._forget.append(PageForget(key, rank))

    def delete(self, key: str) -> None:
        """Delete the file of an entry, or all files of a template."""
        if self._has_disk:
            self._delete.append(key)

    def lose(self, rank: int) -> None:
        """Drop the orders to a rank that has died, and with it all that it was to forget."""
        self.down.add(rank)
        self.copies = [copy for copy in self.copies if copy.rank != rank]
        self._forget = [forget for forget in self._forget if forget.rank != rank]

    def take(self) -> CacheOrders:
        """Return and clear all orders except those that wait."""
        copies = tuple(copy for copy in self.copies if copy.rank not in self.down)
        orders = CacheOrders(copies, tuple(self._forget), tuple(self._delete))
        self.copies = [copy for copy in self.copies if copy.rank in self.down]
        self._forget.clear()
        self._delete.clear()
        return orders
