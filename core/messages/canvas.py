"""Canvas: a size that a picture is made at, and what is there already."""

from __future__ import annotations

import msgspec

from core.handles import ArrayRef

EMPTY_RGB = 128
"""Each of the three numbers of an empty canvas's pixels: mid-grey, as which models see a picture that is masked as a
whole."""


class Canvas(msgspec.Struct, frozen=True, kw_only=True):
    """A picture size that nodes of a workflow work at. Arrays are in the sender's arena, where an image processor has
    made them, and stay valid until the request's terminal message.
    """

    width: int  # px
    height: int  # px
    # The picture to edit, from PreparedImages; None: there is none, and everything is made.
    template: ArrayRef | None = None
    mask: ArrayRef | None = None
    active: ArrayRef | None = None
    control_pictures: tuple[ArrayRef, ...] = ()  # uint8 [height, width, 3] each
    # Sizes, from the model and the picture.
    num_tokens: int  # image tokens
    num_condition_tokens: int = 0  # condition tokens, which no mask-aware step computes
    num_reference_tokens: int = 0  # those of them that are of references
    max_text_tokens: int  # length to which the prompt is padded or cut
    extra_text_tokens: int = 0  # see `ModelInfo.text_tokens_beside`

    @property
    def num_text_tokens(self) -> int:
        """Text tokens of each row in the denoiser."""
        return self.max_text_tokens + self.extra_text_tokens

    @property
    def num_all_tokens(self) -> int:
        """Image, condition and text tokens: what a step's tokens attend to, and what a full step computes."""
        return self.num_tokens + self.num_condition_tokens + self.num_text_tokens

    @property
    def num_active_tokens(self) -> int:
        """Tokens that a mask-aware step computes: active image tokens and text tokens."""
        return (self.num_tokens if self.active is None else self.active.size) + self.num_text_tokens
