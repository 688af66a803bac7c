"""ControlNet: the ControlNets of the served model."""

from __future__ import annotations

from collections.abc import Iterator

from core.graph.workflow import Edge
from entrypoints.workflows.connected import Connected
from entrypoints.workflows.families.family_model import OF_ENGINE, FamilyModel, canvas_of, failure
from entrypoints.workflows.families.step_edges import step_edges


class ControlNet(FamilyModel):
    """What the request's control pictures add to a step: `controlnet_outputs = controlnet(latents, prompt_embeds,
    ref_image)`. Each of the pictures says which of the ControlNets sees it.
    """

    op = "controlnet"
    repeats = True

    def __init__(self) -> None:
        super().__init__()

    def setup_io(self) -> None:
        self.add_input("latents", OF_ENGINE)
        self.add_input("prompt_embeds", OF_ENGINE)
        self.add_input("ref_image", OF_ENGINE)
        self.add_output("residuals", OF_ENGINE)

    def canvas(self, connected: Connected) -> str:
        """That of the latents. Raises WorkflowError for control pictures of another."""
        canvas = canvas_of(connected, "latents")
        if canvas_of(connected, "ref_image") != canvas:
            raise failure(connected, "ref_image", "they have another size than the latents; encode them at their scale")
        return canvas

    def edges(self, connected: Connected) -> Iterator[Edge]:
        return step_edges(connected)
