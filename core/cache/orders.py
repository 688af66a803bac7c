"""What the activation cache wants done: orders that wait for the next plan, which takes them to the workers."""

from __future__ import annotations

from dataclasses import dataclass

from core.messages.worker import PageCopy


@dataclass(frozen=True, slots=True)
class CacheOrders:
    """What workers shall do, in this order: forget (device memory of dropped entries), delete (files, of entries or of
    whole templates), copies."""

    copies: tuple[PageCopy, ...]
    forget: tuple[str, ...]
    delete: tuple[str, ...]


class PendingOrders:
    """Orders given since the last `take`, each of which is handed out once. has_disk: else there are no files, and
    nothing to delete."""

    def __init__(self, *, has_disk: bool) -> None:
        self.copies: list[PageCopy] = []
        self._forget: list[str] = []
        self._delete: list[str] = []
        self._has_disk = has_disk

    def copy(self, order: PageCopy) -> None:
        """Move an entry up or down a tier."""
        self.copies.append(order)

    def forget(self, key: str) -> None:
        """Drop an entry from device memory."""
        self._forget.append(key)

    def delete(self, key: str) -> None:
        """Delete the file of an entry, or all files of a template."""
        if self._has_disk:
            self._delete.append(key)

    def take(self) -> CacheOrders:
        """All of them."""
        orders = CacheOrders(tuple(self.copies), tuple(self._forget), tuple(self._delete))
        self.copies.clear()
        self._forget.clear()
        self._delete.clear()
        return orders
