"""LoRA: an adapter of the served model."""

from __future__ import annotations

from core.lora import Lora
from entrypoints.workflows.families.family_model import FamilyModel


class LoRA(FamilyModel):
    """`flux.add_patch(LoRA("hat"))`: all requests have the served model's adapter of this name, as if each named it,
    also where its file has layers for text encoders. It is no node.
    """

    def __init__(self, name: str, scale: float = 1.0) -> None:
        """scale: see `core.lora`. Raises InvalidRequestError."""
        super().__init__()
        self.lora = Lora(name, scale)

    def setup_io(self) -> None:
        """It takes and makes nothing."""
