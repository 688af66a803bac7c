"""Upscaler: latents of a smaller picture at the size of the whole one."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from core.errors import WorkflowError
from core.interpolation import Interpolation
from entrypoints.workflows.connected import Connected
from entrypoints.workflows.families.family_model import OF_ENGINE, FamilyModel, canvas_of, failure
from entrypoints.workflows.lowered import Lowered


class Upscaler(FamilyModel):
    """Enlarges the latents that a first pass has made, for a second one (see LatentsGenerator):
    `latents = upscaler(latents)`. `Upscaler(method="nearest-exact")` does so in another way than bilinear.
    """

    op = "upscale"
    part = "_vae"

    def __init__(self, role: str = "", method: str = "bilinear") -> None:
        """method: an Interpolation. Raises WorkflowError."""
        super().__init__(role)
        if method not in get_args(Interpolation):
            problem = f"it is {method!r:.80}; there are {', '.join(get_args(Interpolation))}"
            raise WorkflowError(f"Upscaler, method: {problem}", node="Upscaler", input="method")
        self._method = method

    def lower(self, connected: Connected) -> Lowered:
        """With its method. Raises WorkflowError."""
        lowered = super().lower(connected)
        if self._method == "bilinear":
            return lowered
        node = replace(lowered.node, literals={**lowered.node.literals, "method": self._method})
        return replace(lowered, node=node)

    def setup_io(self) -> None:
        self.add_input("latents", OF_ENGINE)
        self.add_output("latents", OF_ENGINE)

    def canvas(self, connected: Connected) -> str:
        """Always that of the final picture. Raises WorkflowError for latents that are of it already."""
        if not canvas_of(connected, "latents"):
            raise failure(connected, "latents", "they are of the whole picture already")
        return ""
