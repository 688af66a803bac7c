"""KeyRing: the valid API keys, which can be replaced while the server runs."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable


class KeyRing:
    """Stores digests of keys, not the keys. A digest identifies the key's owner, so the owners of templates, pages and
    rate limits stay the same when keys are replaced and when the server restarts.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._owners)

    def replace(self, keys: Iterable[str]) -> None:
        """Accept only these keys from now on. Running requests are not affected."""
        self._owners = tuple(dict.fromkeys(_digest(key.encode()) for key in keys))

    def owner_of(self, key: bytes) -> str | None:
        """The owner of `key`, its digest as 64 hex digits; None for an unknown key. The time taken does not depend on
        which key matches.
        """
        owner = _digest(key)
        is_known = any([hmac.compare_digest(owner, known) for known in self._owners])  # noqa: C419 - no early exit
        return owner if is_known else None


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
