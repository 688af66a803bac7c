"""Random inputs of a denoising step, for steps that are timed without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from core.page_scheme import PageDtype, PageLayout
from model_executor.models.base import ModulationInputs, PrimeRow, Row
from model_executor.models.latents import pack, unpack
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.models.transformer.flux2_transformer import CONDITION_TIME
from model_executor.models.unet.unet import Unet
from model_executor.page_cache.pages import Pages

PAGES: PageDtype = "int8"

Call = Callable[[], object]
Draw = Callable[..., Tensor]
"""Sizes -> a random tensor of the step's device and dtype."""


class Primes(Protocol):
    """What makes pages: a Denoiser or a Unet."""

    def page_layout(self, dtype: PageDtype) -> PageLayout: ...

    def prime(self, rows: list[PrimeRow], blocks: tuple[int, int]) -> Any: ...


def transformer_row(denoiser: Denoiser, side: int, text_tokens: int, draw: Draw, guidance_scale: float = 1.0) -> Row:
    """An exact row of a square picture with this many tokens a side, with the modulation that a run computes once."""
    config = denoiser.module.config
    width = config.out_channels or config.in_channels
    widths = (width, config.in_channels - width, config.joint_attention_dim, config.pooled_projection_dim)
    return exact_row(denoiser, side, text_tokens, widths, draw, guidance_scale)


def exact_row(
    denoiser: Denoiser,
    side: int,
    text_tokens: int,
    widths: tuple[int, int, int, int],
    draw: Draw,
    guidance_scale: float = 1.0,
    references: int = 0,
) -> Row:
    """As `transformer_row`, with all that a run computes once. widths: of latents, condition, prompt and pooled
    prompt. references: pictures of the same size that follow the template, each with condition tokens of its own."""
    width, condition, text, pooled = widths
    latents = draw(side * side, width)
    row = Row(
        latents=latents,
        condition=draw((1 + references) * side * side, condition),
        prompt_embeds=draw(text_tokens, text),
        pooled_prompt_embeds=draw(pooled),
        sigma=torch.tensor(0.6, device=latents.device),
        guidance_scale=guidance_scale,
        grid=(side, side),
        references=((side, side),) * references,
    )
    return modulated(denoiser, replace(row, prompt_state=denoiser.prompt_state(row.prompt_embeds, ())))


def operations_bound(image: int, active: int, text: int, num_blocks: int, image_blocks: int = 0) -> float:
    """Floating-point operations of an exact step over those of one with this many active tokens. image: tokens that the
    exact one computes beside those of the text. image_blocks: blocks that compute image tokens alone, of all
    `num_blocks`.

    In every block the linear layers and the attention over all keys both grow with the tokens that are computed.
    """
    exact, masked = (
        image_blocks * computed + (num_blocks - image_blocks) * (computed + text) for computed in (image, active)
    )
    return exact / masked


def modulated(denoiser: Denoiser, row: Row) -> Row:
    table = denoiser.modulation(ModulationInputs(row.pooled_prompt_embeds, row.guidance_scale, row.sigma[None], 1))
    return replace(row, modulation=table)


def unet_row(unet: Unet, side: int, text_tokens: int, draw: Draw) -> Row:
    """An exact row of a square picture, `side` tokens of 32 pixels a side, with what a run computes once."""
    config: Any = unet.module.config
    pooled = 0
    if config.addition_embed_type:
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    latents = draw(side * side, 16 * config.in_channels)
    prompt_embeds = draw(text_tokens, config.cross_attention_dim)
    return Row(
        latents=latents,
        condition=draw(side * side, 0),
        prompt_embeds=prompt_embeds,
        prompt_state=unet.keys_values(prompt_embeds, ()),
        pooled_prompt_embeds=draw(pooled),
        sigma=torch.tensor(0.5, device=latents.device),
        guidance_scale=5.0,
        grid=(side, side),
    )


def template_row(row: Row, sigma: float, entry: Tensor) -> PrimeRow:
    """Primes `entry` with the row's own inputs at noise level `sigma`."""
    return PrimeRow(
        latents=row.latents,
        condition=row.condition,
        prompt_embeds=row.prompt_embeds,
        pooled_prompt_embeds=row.pooled_prompt_embeds,
        sigma=torch.tensor(sigma, device=row.latents.device),
        guidance_scale=row.guidance_scale,
        grid=row.grid,
        references=row.references,
        hidden=None,
        entry=entry,
    )


def primed_entry(model: Primes, row: Row, sigma: float) -> Tensor:
    """Pages of a row's own inputs at a keyframe, uint8 [entry bytes]."""
    layout = _layout(model, row)
    entry = torch.empty(layout.entry_bytes(len(row.latents)), dtype=torch.uint8, device=row.latents.device)
    model.prime([template_row(row, sigma, entry)], (0, layout.num_blocks))
    return entry


def pages_between(model: Primes, row: Row, near: Tensor, far: Tensor, weight: float = 0.37) -> Pages:
    """Pages of a step that lies between two keyframes."""
    return Pages(_layout(model, row), len(row.latents), near, far, weight)


def _layout(model: Primes, row: Row) -> PageLayout:
    layout = model.page_layout(PAGES)
    return layout.with_conditions(len(row.condition)) if row.references else layout


def diffusers_step(module: Any, row: Row, batch: int = 1) -> Callable[[], tuple[Tensor]]:
    """A FLUX module's own forward of the row, dense: velocities [batch, image tokens, width]."""
    device, (rows, columns) = row.latents.device, row.grid
    positions = torch.cartesian_prod(torch.zeros(1), torch.arange(float(rows)), torch.arange(float(columns)))
    inputs = {
        "hidden_states": torch.cat([row.latents, row.condition], dim=1).expand(batch, -1, -1),
        "timestep": row.sigma.to(row.latents.dtype).expand(batch),
        "guidance": torch.full([batch], row.guidance_scale, device=device) if module.config.guidance_embeds else None,
        "pooled_projections": row.pooled_prompt_embeds.expand(batch, -1),
        "encoder_hidden_states": row.prompt_embeds.expand(batch, -1, -1),
        "txt_ids": torch.zeros(len(row.prompt_embeds), 3, device=device),
        "img_ids": positions.to(device),
        "return_dict": False,
    }
    return lambda: module(**inputs)


def klein_step(module: Any, row: Row) -> Callable[[], Tensor]:
    """A FLUX.2 module's own forward of the row, whose condition tokens are a second picture: velocity [image tokens,
    width]."""
    device, (rows, columns) = row.latents.device, (torch.arange(float(side)) for side in row.grid)
    text = torch.zeros(len(row.prompt_embeds), 4)
    text[:, 3] = torch.arange(len(text))
    pictures = torch.cartesian_prod(torch.tensor([0.0, CONDITION_TIME]), rows, columns, torch.zeros(1))
    inputs = {
        "hidden_states": torch.cat([row.latents, row.condition])[None],
        "timestep": row.sigma.to(row.latents.dtype).expand(1),
        "encoder_hidden_states": row.prompt_embeds[None],
        "txt_ids": text.to(device),
        "img_ids": pictures.to(device),
        "return_dict": False,
    }
    number = len(row.latents)
    return lambda: module(**inputs)[0][0][:number]


def z_image_step(module: Any, row: Row) -> Callable[[], Tensor]:
    """A Z-Image module's own forward of the row: velocity [image tokens, width]."""
    time, frames = (1 - row.sigma)[None], [unpack(row.latents, row.grid)[0][:, None]]

    def step() -> Tensor:
        (velocity,) = module(frames, time, [row.prompt_embeds], return_dict=False)[0]
        return -pack(velocity[:, 0][None])

    return step
