"""StepLimit: learns how many tokens may share a step on this device.

`--max-num-batched-tokens` may exceed what the device's memory holds, and other programs may take memory later. A batch
that had to be split lowers the limit to the size of one part, so that not every step fails first; every unsplit step
raises it a little, unless the step was too small to show what fits.
"""

from __future__ import annotations

RAISE_BY = 64
"""Every step that fills at least half of the limit raises it by 1/64. The limit doubles in some 45 steps, so at most
one step in 45 fails."""


class StepLimit:
    """The current limit of one scheduler."""

    def __init__(self, max_tokens: int) -> None:
        self.tokens = max_tokens  # current limit of a step with several requests
        self._max_tokens = max_tokens

    def note(self, tokens: int, num_parts: int) -> None:
        """Note a successful step of this many tokens. num_parts: above 1 if it failed as a whole and was split."""
        if num_parts > 1:
            self.note_split(tokens, num_parts)
        else:
            self.note_done(tokens)

    def note_done(self, tokens: int) -> None:
        """Note a step that was done unsplit. It raises the limit if it fills at least half of it. When the limit keeps
        a request out, the others fill at least half, unless the excluded request alone needs more than half.
        """
        if 2 * tokens >= self.tokens:
            self.tokens = min(self._max_tokens, self.tokens + max(1, self.tokens // RAISE_BY))

    def note_split(self, tokens: int, num_parts: int) -> None:
        """Note a step that failed as a whole and was done in parts."""
        self.tokens = max(1, min(self.tokens, tokens // num_parts))
