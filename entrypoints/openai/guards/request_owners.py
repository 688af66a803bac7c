"""RequestOwners: remembers which API key sent each recent request, so that callers see only their own request ids."""

from __future__ import annotations

import hmac
import secrets

MAX_KEPT = 8192
"""Requests remembered; more than appear in engines' recent steps. Older ones are treated as foreign to all callers."""


class RequestOwners:
    """Owners of the last MAX_KEPT requests. An owner is a key's digest, or "" if no keys are required: then every
    caller sees all ids.
    """

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}  # request id -> owner, the oldest first
        self._secret = secrets.token_bytes(16)

    def note(self, request_id: str, owner: str) -> None:
        """Remember the owner of an accepted request."""
        if not owner:
            return
        self._owners[request_id] = owner
        if len(self._owners) > MAX_KEPT:
            del self._owners[next(iter(self._owners))]

    def shown(self, image_id: str, owner: str) -> str:
        """An image's id as `owner` sees it: the id itself if the request is its own, else a pseudonym, the same each
        time.
        """
        if not owner or self._owners.get(image_id.partition("-")[0]) == owner:
            return image_id
        return "other_" + hmac.digest(self._secret, image_id.encode(), "sha256").hex()[:16]
