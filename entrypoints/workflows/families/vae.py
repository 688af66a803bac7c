"""VAE: the autoencoder of the served model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.errors import WorkflowError
from core.graph.workflow import Edge, Node
from entrypoints.workflows.connected import Connected
from entrypoints.workflows.data_type import Image
from entrypoints.workflows.families.control_encode import ControlEncode
from entrypoints.workflows.families.family_model import OF_ENGINE, FamilyModel
from entrypoints.workflows.lowered import Lowered


class VAE(FamilyModel):
    """The picture of latents, `vae(latents, mode="decode")`, and control pictures as ControlNets see them,
    `vae(image=ref_image, mode="encode")`.
    """

    op = "decode"
    part = "_vae"

    def setup_io(self) -> None:
        self.add_input("latents", OF_ENGINE)
        self.add_output("picture", Image)

    def __call__(self, *values: object, mode: object = "decode", **named: object) -> Any:
        if mode not in ("encode", "decode"):
            problem = f"it is {mode!r:.80}; give encode or decode"
            raise WorkflowError(f"VAE, mode: {problem}", node="VAE", input="mode")
        if mode == "decode":
            return super().__call__(*values, **named)
        if self.role:
            problem = "control pictures are encoded by the served model's; leave it out"
            raise WorkflowError(f"VAE, role: {problem}", node="VAE", input="role")
        return ControlEncode()(*values, **named)

    def lower(self, connected: Connected) -> Lowered:
        """With a preview: what the last step of all made so far would be without noise."""
        lowered = super().lower(connected)
        (latents,) = lowered.node.inputs
        clean = Edge(latents.source, "clean", "latents")
        preview = Node(f"{connected.node}_preview", "decode", (clean,), self.role, shows=latents.source)
        return replace(lowered, preview=preview)
