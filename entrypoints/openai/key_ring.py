"""KeyRing: the API keys that open /v1/*, which may change while requests come."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable


class KeyRing:
    """Keeps the digests of keys, and no key. A key's digest is what its owner is known by, so that owners, and with
    them templates, pages and rate limits, stay the same when the ring is replaced and when the server starts again.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._owners)

    def replace(self, keys: Iterable[str]) -> None:
        """From now on these keys and no others open. What they have opened before goes on."""
        self._owners = tuple(dict.fromkeys(_digest(key.encode()) for key in keys))

    def owner_of(self, key: bytes) -> str | None:
        """The owner, 64 hex digits, whose key came; None for one that opens nothing. Takes the same time for every key,
        whichever it equals and however long it is.
        """
        owner = _digest(key)
        is_known = any([hmac.compare_digest(owner, known) for known in self._owners])  # noqa: C419 - no early exit
        return owner if is_known else None


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
