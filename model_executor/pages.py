"""Pages as tensors: see `core.page_scheme` for how they lie in memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from core.page_scheme import PageLayout


@dataclass(frozen=True, slots=True)
class Pages:
    """A template's pages at one noise level: (1 - weight) * near + weight * far.

    near, far: entries, uint8 [entry bytes]; far is None exactly at a keyframe.
    """

    layout: PageLayout
    num_tokens: int
    near: Tensor
    far: Tensor | None
    weight: float
