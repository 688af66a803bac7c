"""GenerationSpec: a picture to make from nothing."""

from __future__ import annotations

from core.messages.specs.picture_spec import PictureSpec


class GenerationSpec(PictureSpec, frozen=True, kw_only=True, tag="generation"):
    """An image to make of a prompt or a class alone. Where a model must see a template, it sees an empty canvas."""
