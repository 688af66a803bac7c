"""UnetUnionControlNet: ControlNets of SDXL for several kinds of pictures, all of which one run sees."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from torch import Tensor

from model_executor.models.base import Row
from model_executor.models.controlnet.controlnet import Shown
from model_executor.models.controlnet.residuals import Residuals
from model_executor.models.controlnet.unet_controlnet import UnetControlNet


class UnetUnionControlNet(UnetControlNet):
    """What xinsir's ControlNet++ adds for several pictures is not the sum of what it adds for each."""

    families: ClassVar[Collection[str]] = ("sdxl",)
    is_joint = True
    usual_channels: ClassVar[tuple[int, ...]] = (48, 96, 192, 384)

    def _check_modes(self, modes: Collection[int], num_modes: int | None) -> None:
        super()._check_modes(modes, int(self._config.get("num_control_type", 6)))
        if self._model.sees_mask:
            raise self._refuse("it goes with no UNet that sees the mask (9 input channels), as diffusers has it")

    def _maps(self, rows: Sequence[Row], latents: Tensor, shown: Sequence[tuple[Tensor, Shown]]) -> Residuals:
        modes = [each.mode for _, each in shown]
        kinds = latents.new_zeros(len(rows), int(self._module.config.num_control_type))
        for mode in modes:  # all at once they would be uploaded as an index, for which a GPU is waited for
            kinds[:, mode] = 1
        pictures = [embedded.expand(len(rows), -1, -1, -1) for embedded, _ in shown]
        scales = [each.scale for _, each in shown]
        control = {"controlnet_cond": pictures, "control_type": kinds, "control_type_idx": modes}
        return self._run(rows, latents, **control, conditioning_scale=scales)
