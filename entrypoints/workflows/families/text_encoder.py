"""TextEncoder: the text encoders of the served model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from core.graph.op import Port
from entrypoints.workflows.families.family_model import OF_ENGINE, FamilyModel
from entrypoints.workflows.request_fields import PROMPT


class TextEncoder(FamilyModel):
    """The request's prompt, and what else it says in words, as embeddings: `prompt_embeds = text_encoder(prompt)`."""

    op = "text_encode"
    part = "_text_encoder"
    fields: ClassVar[Mapping[str, Port]] = {"prompt": PROMPT}

    def setup_io(self) -> None:
        self.add_input("prompt", str)
        self.add_output("prompt_embeds", OF_ENGINE)
