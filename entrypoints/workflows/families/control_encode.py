"""ControlEncode: the served model's autoencoder, as ControlNets use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from core.graph.controlling import CONTROLS
from core.graph.op import Port
from entrypoints.workflows.connected import Connected
from entrypoints.workflows.data_type import Image
from entrypoints.workflows.families.family_model import OF_ENGINE, FamilyModel, scaled_canvas
from entrypoints.workflows.request_fields import HIRES_SCALE


class ControlEncode(FamilyModel):
    """The request's control pictures, as its ControlNets see them in every step; what a VAE calls to encode them."""

    op = "control_encode"
    fields: ClassVar[Mapping[str, Port]] = {"image": CONTROLS, "scale": HIRES_SCALE}
    plain = ("scale",)

    def __init__(self) -> None:
        super().__init__()

    def setup_io(self) -> None:
        self.add_input("image", Image)
        self.add_input("scale", float, required=False)
        self.add_output("controls", OF_ENGINE)

    def canvas(self, connected: Connected) -> str:
        """The one that `scale` says, as of LatentsGenerator."""
        return scaled_canvas(connected)
