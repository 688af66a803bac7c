"""StepLimit: how many tokens may share a step on this device, as far as has been seen.

`--max-num-batched-tokens` may be more than the device's memory holds, and others may take memory meanwhile. A batch
that had to be done in parts lowers the limit to what one part had, so that not every step fails first; every step that
is done in one raises it a little.
"""

from __future__ import annotations

RAISE_BY = 64
"""One part in so many of the limit is added to it for every step that fits. It doubles in some 45 steps: no more than
one attempt in that many fails."""


class StepLimit:
    """One per scheduler."""

    def __init__(self, max_tokens: int) -> None:
        self.tokens = max_tokens  # that a step of several requests may have now
        self._max_tokens = max_tokens

    def note_done(self) -> None:
        """A step was done in one."""
        self.tokens = min(self._max_tokens, self.tokens + max(1, self.tokens // RAISE_BY))

    def note_split(self, tokens: int, num_parts: int) -> None:
        """A step of so many tokens failed as a whole, and was done in parts."""
        self.tokens = max(1, min(self.tokens, tokens // num_parts))
