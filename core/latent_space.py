"""LatentSpace: whose latents a model can go on with."""

from __future__ import annotations

from typing import Any

import msgspec


class LatentSpace(msgspec.Struct, frozen=True, kw_only=True):
    """What two models must have alike for one to go on with the latents of the other. Whether the weights of their VAEs
    fit together is not known."""

    token_size: int  # px of a token's side
    latent_width: int  # numbers of a token
    scaling: dict[str, Any]  # how the VAE's latents are scaled and shifted, as in its configuration
    noise: str  # how large latents are at a noise level: a Scale, see model_executor/samplers/sampling.py
    sampler: str  # the scheduler's class, for an error's text

    def why_not(self, other: LatentSpace) -> str:
        """Why one model cannot go on with latents of the other; "": it can."""
        for what, mine, its in (
            ("tokens of {} pixels' side", self.token_size, other.token_size),
            ("{} numbers in a token", self.latent_width, other.latent_width),
            ("latents scaled with {}", self.scaling, other.scaling),
        ):
            if mine != its:
                return f"{what.format(mine)}, and {what.format(its)}"
        if self.noise != other.noise:
            return f"the scheduler {self.sampler}, and {other.sampler}, which keeps noised latents at another scale"
        return ""
