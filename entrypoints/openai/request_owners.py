"""RequestOwners: whose the last requests were, so that a caller sees the ids of its own and no others'."""

from __future__ import annotations

import hmac
import secrets

MAX_KEPT = 8192
"""Requests: more than engines tell steps of. Of an older one nobody is the owner."""


class RequestOwners:
    """What `note` was told of. An owner is a key's digest, or "" where no keys are asked for: then all see all."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}  # request id -> owner, the oldest first
        self._secret = secrets.token_bytes(16)

    def note(self, request_id: str, owner: str) -> None:
        """This request was accepted."""
        if not owner:
            return
        self._owners[request_id] = owner
        if len(self._owners) > MAX_KEPT:
            del self._owners[next(iter(self._owners))]

    def shown(self, image_id: str, owner: str) -> str:
        """What `owner` is told of one of a request's images: its id, or the same made-up one each time."""
        if not owner or self._owners.get(image_id.partition("-")[0]) == owner:
            return image_id
        return "other_" + hmac.digest(self._secret, image_id.encode(), "sha256").hex()[:16]
