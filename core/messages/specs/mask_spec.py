"""MaskSpec: a mask to find in a picture."""

from __future__ import annotations

from core.handles import ArrayRef
from core.messages.specs.mask_search import MaskSearch
from core.messages.specs.picture_spec import PictureSpec


class MaskSpec(PictureSpec, frozen=True, kw_only=True, tag="mask"):
    """A mask to find in a template; no picture is made. Mask and active tokens as in an EditSpec with a search."""

    template: ArrayRef
    mask: ArrayRef
    active: ArrayRef
    search: MaskSearch

    def with_mask(self, num_active: int) -> MaskSpec:
        """The spec, now that the mask is found: nothing else depends on it."""
        return self
