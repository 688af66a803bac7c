"""Upscaler: latents of a smaller picture at the size of the whole one."""

from __future__ import annotations

from entrypoints.workflows.connected import Connected
from entrypoints.workflows.families.family_model import OF_ENGINE, FamilyModel, canvas_of, failure


class Upscaler(FamilyModel):
    """Enlarges the latents that a first pass has made, for a second one (see LatentsGenerator):
    `latents = upscaler(latents)`.
    """

    op = "upscale"
    part = "_vae"

    def setup_io(self) -> None:
        self.add_input("latents", OF_ENGINE)
        self.add_output("latents", OF_ENGINE)

    def canvas(self, connected: Connected) -> str:
        """Always that of the final picture. Raises WorkflowError for latents that are of it already."""
        if not canvas_of(connected, "latents"):
            raise failure(connected, "latents", "they are of the whole picture already")
        return ""
