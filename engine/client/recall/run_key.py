"""RunKey: which runs may begin in each other's states."""

from __future__ import annotations

from typing import NamedTuple

from core.patches import PatchSet
from core.sampling_params import SamplingParams


class RunKey(NamedTuple):
    """All that a run's states depend on, but for its prompt and seed, and whose they are."""

    owner: str  # digest of its API key; whatever `CacheConfig.scope` is, since a state shows what its picture is like
    model: str
    patches: PatchSet
    workflow: str
    width: int
    height: int
    content_id: str  # of the picture to edit, and its references
    sampling: SamplingParams  # what of it changes states
