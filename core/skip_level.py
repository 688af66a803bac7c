"""SkipLevel: how similar two prompts must be for the later one to skip steps (approximate caching: Agarwal et al.,
"Approximate caching for efficiently serving text-to-image diffusion models", NSDI 2024).

A generation may start from the latents that an earlier one had after some of its steps, if the prompts are similar.
The first steps lay out a picture, which similar prompts share. How many may be skipped at which similarity is measured
per checkpoint by `python -m entrypoints.calibrate --skip-levels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec


class SkipLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One number of steps that may be skipped, and from which similarity on."""

    share: Annotated[float, msgspec.Meta(gt=0, lt=1)]  # of a run's steps, the first ones
    similarity: Annotated[float, msgspec.Meta(ge=-1, le=1)]  # least cosine of the prompts' embeddings
    # The measurement: similarity of the pictures to those with every step, over the pairs of prompts above that.
    ssim_mean: float
    ssim_p10: float
    num_pairs: int

    def steps_of(self, num_steps: int) -> int:
        """Steps that a run of so many computed steps skips: never more than the share, and never all."""
        return int(self.share * num_steps + 1e-6)


def skips_of(levels: Sequence[SkipLevel], num_steps: int) -> tuple[int, ...]:
    """The numbers of steps that runs of so many computed steps may skip, rising: after these their states are kept."""
    return tuple(sorted({steps for level in levels if (steps := level.steps_of(num_steps))}))


def most_skipped(levels: Sequence[SkipLevel], num_steps: int, similarity: float) -> int:
    """The most steps that a run of so many computed steps may skip from a prompt of this similarity; 0: none."""
    return max((each.steps_of(num_steps) for each in levels if similarity >= each.similarity), default=0)
