"""EditSpec: a picture to change under a mask."""

from __future__ import annotations

import msgspec

from core.handles import ArrayRef
from core.messages.specs.mask_search import MaskSearch
from core.messages.specs.picture_spec import PictureSpec


class EditSpec(PictureSpec, frozen=True, kw_only=True, tag="edit"):
    """An image to make from a template and a mask. With a search, mask and active tokens are memory for what is found:
    `active` has a predicted length, and room for all tokens.
    """

    template: ArrayRef
    mask: ArrayRef
    active: ArrayRef
    search: MaskSearch | None = None  # None: the mask is given

    def with_mask(self, num_active: int) -> EditSpec:
        """The spec of the same edit, now that its mask is found. num_active: the active tokens, at least one."""
        assert self.search is not None
        run = self.search.run(num_active)
        return msgspec.structs.replace(
            self,
            active=msgspec.structs.replace(self.active, shape=(num_active,)),
            is_mask_aware=run.is_mask_aware,
            sampling=msgspec.structs.replace(
                self.sampling, full_steps=run.full_steps, own_page_steps=run.own_page_steps
            ),
        )
