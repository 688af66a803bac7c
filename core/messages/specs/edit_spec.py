"""EditSpec: a picture to change under a mask."""

from __future__ import annotations

from core.handles import ArrayRef
from core.messages.specs.picture_spec import PictureSpec


class EditSpec(PictureSpec, frozen=True, kw_only=True, tag="edit"):
    """An image to make from a template and a mask."""

    template: ArrayRef
    mask: ArrayRef
    active: ArrayRef
