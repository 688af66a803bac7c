"""What can be said of families and checkpoints without loading a weight; as JSON from a process that has torch."""

from __future__ import annotations

import msgspec

from core.model_info import ModelInfo
from core.page_scheme import PageLayout


class FamilyCard(msgspec.Struct, frozen=True, kw_only=True):
    """A family: the pipelines of model_index.json that it serves, and in a few words how."""

    name: str
    pipelines: tuple[str, ...]
    summary: str


class AdapterCard(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter. num_layers: of the transformer, that it adds to. ranks: least and most of these layers."""

    name: str
    num_layers: int
    ranks: tuple[int, int]
    parameters: int


class CheckpointCard(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, and adapters that fit it. parameters: of each part with weights. layout, num_keyframes,
    latent_bytes: how its templates are cached where no flag or calibration says otherwise; see PageScheme."""

    pipeline: str
    scheduler: str
    info: ModelInfo
    parameters: dict[str, int]
    layout: PageLayout
    num_keyframes: int
    latent_bytes: int
    adapters: tuple[AdapterCard, ...] = ()

    def tokens(self, width: int, height: int) -> int:
        """Image tokens of a picture of so many pixels."""
        return self.info.num_image_tokens(width, height)

    def template_bytes(self, width: int, height: int) -> int:
        """Bytes of all that is cached of a picture."""
        num_tokens = self.tokens(width, height)
        return self.num_keyframes * self.layout.entry_bytes(num_tokens) + num_tokens * self.latent_bytes
