"""UnetControlNet: ControlNets of Stable Diffusion, copies of the UNet's way down, over diffusers' module."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce
from operator import add
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.kernels.cpu_layers import use_onednn
from model_executor.kernels.linear import onednn_keeps_rows
from model_executor.models.base import Row, SteeredModel
from model_executor.models.boxes import Box, cut, times
from model_executor.models.controlnet.controlnet import ControlNet, Shown
from model_executor.models.controlnet.residuals import Residuals
from model_executor.models.latents import unpack
from model_executor.models.unet.control_box import control_box
from model_executor.models.unet.unet_blocks import TOKEN_SIDE
from model_executor.models.unet.unet_conditions import UnetConditions, texts
from model_executor.parallel.group import Group

ALIKE = (
    *("block_out_channels", "layers_per_block", "cross_attention_dim"),
    *("addition_embed_type", "projection_class_embeddings_input_dim"),
)
"""Entries of the configuration that are those of the UNet."""


class UnetControlNet(ControlNet):
    """A mask-aware step has it compute `control_box` alone, as if that were the picture: it sees nothing beyond."""

    families: ClassVar[Collection[str]] = ("sd", "sdxl")
    usual_channels: ClassVar[tuple[int, ...]] = (16, 32, 96, 256)
    """Of the layers that embed a picture, where the configuration does not say: each but the first halves it."""

    def __init__(self, checkpoint: ModelCheckpoint, model: SteeredModel, modes: Collection[int] = ()) -> None:
        super().__init__(checkpoint, model, modes)
        self._conditions = UnetConditions(
            model.num_train_timesteps, model.token_size, checkpoint.device, has_scores=model.has_scores
        )
        self._num_levels = len(self._config["down_block_types"])
        self._embedding: Any = None  # the part of the loaded module that embeds pictures

    def _check(self, modes: Collection[int]) -> None:
        config, model = self._config, self._model
        for name in ALIKE:
            if config.get(name) != model.config.get(name):
                raise self._refuse(f"{name} is {config.get(name)}, and {model.config.get(name)} in the model's UNet")
        if config.get("in_channels", 4) != model.latent_channels:
            raise self._refuse(f"in_channels is not {model.latent_channels}, the channels of the model's latents")
        if config.get("global_pool_conditions"):
            raise self._refuse("global_pool_conditions is set, and ControlNets whose maps are averaged are not served")
        strides = 2 ** (len(config.get("conditioning_embedding_out_channels", self.usual_channels)) - 1)
        if strides != model.vae_scale:
            raise self._refuse(
                f"it makes pictures {strides} times smaller, and the model's VAE {model.vae_scale} times"
            )
        self._check_modes(modes, None)

    @classmethod
    def pack(cls, checkpoint: ModelCheckpoint, module: nn.Module) -> None:
        convolutions: list[Any] = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
        for convolution in convolutions:  # faster, as in `Unet`
            convolution.to(memory_format=torch.channels_last)
        if checkpoint.device.type == "cpu":
            use_onednn(module)

    def put(self, module: nn.Module) -> None:
        """A picture is embedded once for all steps, so the module gets it embedded."""
        self.pack(self.checkpoint, module)
        net: Any = module
        self._embedding, net.controlnet_cond_embedding = net.controlnet_cond_embedding, nn.Identity()
        net.register_to_config(controlnet_conditioning_channel_order="rgb")  # `embed` has turned it
        super().put(module)

    def drop(self) -> None:
        super().drop()
        self._embedding = None

    def _residual_numbers(self, grid: tuple[int, int]) -> int:
        """One for the first layer, each layer of each level, each way to the next level, and the middle."""
        channels: Sequence[int] = self._config["block_out_channels"]
        num_layers = int(self._config["layers_per_block"])
        sides = [tuple(-(-side * TOKEN_SIDE // (1 << level)) for side in grid) for level in range(len(channels))]
        areas = [height * width for height, width in sides]
        levels = zip(channels, areas, [*areas[1:], areas[-1]], strict=True)
        return channels[0] * areas[0] + sum(number * (num_layers * area + below) for number, area, below in levels)

    def _embedded_numbers(self, control: Tensor, grid: tuple[int, int]) -> int:
        rows, columns = grid
        return int(self._config["block_out_channels"][0]) * rows * columns * TOKEN_SIDE**2

    def embed(self, control: Tensor, mode: int | None) -> tuple[Tensor, ...]:
        """control: [1, 3, height, width] in 0..1. Returns [1, channels, height / 8, width / 8]."""
        is_turned = self._config.get("controlnet_conditioning_channel_order") == "bgr"
        embedded: Tensor = self._embedding(control.flip(1) if is_turned else control)
        return (embedded,)

    @property
    def _is_row_invariant(self) -> bool:
        """The rows of a request share a pass, also where nothing else does: with `--batch-invariant` on a GPU, and
        where oneDNN does not keep a row's bits."""
        made = self.checkpoint
        return not made.batch_invariant and (made.device.type != "cpu" or onednn_keeps_rows(made.dtype))

    def _residuals(self, rows: Sequence[Row], shown: Sequence[Shown], group: Group | None) -> Residuals:
        """Each rank of a group computes all of it: convolutions have no tokens to share."""
        box = control_box(rows[0], self._num_levels)
        latents = _within(torch.cat([unpack(row.latents, row.grid, TOKEN_SIDE) for row in rows]), box)
        return self._maps(rows, latents, [(_within(each.embedded[0], box), each) for each in shown])

    def _maps(self, rows: Sequence[Row], latents: Tensor, shown: Sequence[tuple[Tensor, Shown]]) -> Residuals:
        """What is added to the maps of the way down, and to that of the middle. shown: with each, what is embedded of
        the part of the picture that is computed."""
        steering = [(embedded, each.scale) for embedded, each in shown if each.scale]
        return reduce(
            add,
            (self._run(rows, latents, controlnet_cond=part, conditioning_scale=scale) for part, scale in steering),
        )

    def _run(self, rows: Sequence[Row], latents: Tensor, **control: Any) -> Residuals:
        """As `_maps`, of one run of the module. control: its arguments about control pictures."""
        down, middle = self._module(
            latents,
            self._conditions.timesteps(rows),
            encoder_hidden_states=texts(rows),
            added_cond_kwargs=self._conditions.added(rows),
            return_dict=False,
            **control,
        )
        maps = *down, middle
        return Residuals(tuple(range(len(maps))), (maps,))


def _within(x: Tensor, box: Box | None) -> Tensor:
    """The part of a map of latent pixels in a box of tokens; None: all of it."""
    return x if box is None else cut(x, times(box, TOKEN_SIDE)).contiguous()
