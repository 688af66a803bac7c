"""Cards: descriptions of families, checkpoints and adapters that need no loaded weights.

They are sent as JSON from a process that may import torch to one that does not.
"""

from __future__ import annotations

import msgspec

from core.model_info import ModelInfo
from core.page_scheme import PageLayout
from core.sampler_defaults import SamplerDefaults


class FamilyCard(msgspec.Struct, frozen=True, kw_only=True):
    """A family of models."""

    name: str
    checkpoints: str  # published ones
    pipelines: tuple[str, ...]  # names in model_index.json that it serves
    summary: str  # how it serves them, in a few words


class AdapterCard(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter."""

    name: str
    num_layers: int  # layers of the transformer that it changes
    ranks: tuple[int, int]  # least and greatest rank of these layers
    parameters: int
    defaults: SamplerDefaults  # that it brings


class CheckpointCard(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint with the adapters that fit it."""

    pipeline: str
    scheduler: str
    info: ModelInfo
    parameters: dict[str, int]  # part with weights -> number of parameters
    # How its templates are cached unless a flag or calibration sets something else, see PageScheme.
    layout: PageLayout | None  # None: it edits nothing, and has no templates
    num_keyframes: int
    latent_bytes: int
    adapters: tuple[AdapterCard, ...] = ()

    def tokens(self, width: int, height: int) -> int:
        """Image tokens of a picture of this size in pixels."""
        return self.info.num_image_tokens(width, height)

    def template_bytes(self, width: int, height: int) -> int:
        """Bytes cached for a picture of this size in pixels; 0 if it edits nothing."""
        if self.layout is None:
            return 0
        num_tokens = self.tokens(width, height)
        return self.num_keyframes * self.layout.entry_bytes(num_tokens) + num_tokens * self.latent_bytes
