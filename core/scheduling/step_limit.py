"""StepLimit: how many tokens may share a step on this device, as far as has been seen.

`--max-num-batched-tokens` may be more than the device's memory holds, and others may take memory meanwhile. A batch
that had to be done in parts lowers the limit to what one part had, so that not every step fails first; every step that
is done in one raises it a little, unless it was so small that it says nothing of what fits.
"""

from __future__ import annotations

RAISE_BY = 64
"""One part in so many of the limit is added to it for every step that fills half of it. It doubles in some 45 steps: no
more than one attempt in that many fails."""


class StepLimit:
    """One per scheduler."""

    def __init__(self, max_tokens: int) -> None:
        self.tokens = max_tokens  # that a step of several requests may have now
        self._max_tokens = max_tokens

    def note(self, tokens: int, num_parts: int) -> None:
        """A step of so many tokens was done: in one, or in parts since as a whole it failed, for nobody's fault."""
        if num_parts > 1:
            self.note_split(tokens, num_parts)
        else:
            self.note_done(tokens)

    def note_done(self, tokens: int) -> None:
        """A step of so many tokens was done in one. Where the limit keeps a request out of the step, what is in it
        comes to half of the limit or more, unless the one that is kept out would take that much.
        """
        if 2 * tokens >= self.tokens:
            self.tokens = min(self._max_tokens, self.tokens + max(1, self.tokens // RAISE_BY))

    def note_split(self, tokens: int, num_parts: int) -> None:
        """A step of so many tokens failed as a whole, and was done in parts."""
        self.tokens = max(1, min(self.tokens, tokens // num_parts))
