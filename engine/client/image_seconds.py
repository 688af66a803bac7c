"""ImageSeconds: predicted processor time of one edit's image work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class ImageSeconds:
    """Predicted time of one image processor for an edit. prepare: its upload. compose: one file of its. composes: all
    its files, one after the other.
    """

    prepare: float
    compose: float
    composes: float
