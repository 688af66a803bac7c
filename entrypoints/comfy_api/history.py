"""History: the prompts that have ended, as /history shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from entrypoints.comfy_api.owned_store import OwnedStore, StoreLimits

LIMITS = StoreLimits(number=1000, nbytes=32 * 2**20, number_in_all=10_000, nbytes_in_all=128 * 2**20)


class History:
    """Of all owners, as JSON, by id of the prompt."""

    def __init__(self, limits: StoreLimits = LIMITS) -> None:
        self._store: OwnedStore[str, msgspec.Raw] = OwnedStore(limits)

    def put(self, owner: str, prompt_id: str, entry: Mapping[str, Any]) -> None:
        """Note how a prompt has ended."""
        text = msgspec.json.encode(entry)
        self._store.put(owner, prompt_id, msgspec.Raw(text), len(text))

    def of(self, owner: str, most: int | None = None, offset: int = -1) -> dict[str, msgspec.Raw]:
        """The prompts of an owner by id, the oldest first. most: of them, the latest ones, or if `offset` is none of
        -1, those from there on.
        """
        found = list(self._store.of(owner))
        begin = max(0, offset if offset >= 0 or most is None else len(found) - most)
        return dict(found[begin:] if most is None else found[begin : begin + max(0, most)])

    def find(self, owner: str, prompt_id: str) -> dict[str, msgspec.Raw]:
        """One prompt by its id; {}: the owner has none of this id."""
        found = self._store.get(owner, prompt_id)
        return {} if found is None else {prompt_id: found}

    def remove(self, owner: str, prompt_ids: Sequence[str]) -> None:
        """Forget these; those that are not there are left out."""
        for each in prompt_ids:
            self._store.remove(owner, each)

    def clear(self, owner: str) -> None:
        """Forget all of an owner's."""
        self.remove(owner, list(self.of(owner)))
