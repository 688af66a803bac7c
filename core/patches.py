"""Patches: what changes a model's layers for some requests without being a model, at a scale per request.

A patch set is a tuple of patches in order of their ids, each id once: requests with equal sets get equal pictures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec


class Patch(msgspec.Struct, frozen=True, omit_defaults=True):
    """A LoRA adapter at a scale."""

    id: str  # hex sha256 of its file: another file under the same name is another patch
    scale: float = 1.0


PatchSet = tuple[Patch, ...]
"""() for the model itself."""


def patch_set(patches: Iterable[Patch]) -> PatchSet:
    """The set of these patches. Equal ids (names of one file) are added up, and those at scale 0 left out."""
    scales: dict[str, float] = {}
    for patch in patches:
        scales[patch.id] = scales.get(patch.id, 0.0) + patch.scale
    return tuple(Patch(patch_id, scale) for patch_id, scale in sorted(scales.items()) if scale)


def patch_digest(patches: PatchSet) -> str:
    """Hex digest of a patch set, "" for the empty one: a part of the keys of what depends on it."""
    return hashlib.sha256(repr([(patch.id, patch.scale) for patch in patches]).encode()).hexdigest() if patches else ""
