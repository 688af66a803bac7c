"""A small checkpoint of random weights of every family, the same for both trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tools.random_checkpoints import (
    make_flux,
    make_flux_fill,
    make_flux_kontext,
    make_klein,
    make_qwen,
    make_qwen_edit,
    make_qwen_edit_plus,
    make_sd3,
    make_z_image,
)
from tools.random_dit_checkpoints import make_dit
from tools.random_unet_checkpoints import make_sd, make_sdxl

MAKERS: Mapping[str, Callable[[Path], Path]] = {
    "flux_fill": lambda path: make_flux_fill(path, guidance_embeds=True),
    "flux": lambda path: make_flux(path, guidance_embeds=True),
    "flux_kontext": lambda path: make_flux_kontext(path, guidance_embeds=True),
    "klein": make_klein,
    "sd3": make_sd3,
    "qwen": make_qwen,
    "qwen_edit": make_qwen_edit,
    "qwen_edit_plus": lambda path: make_qwen_edit_plus(path, zero_cond_t=True),
    "z_image": make_z_image,
    "sd": make_sd,
    "sd_inpaint": lambda path: make_sd(path, in_channels=9),
    "sdxl": make_sdxl,
    "dit": make_dit,
}


def make_all(folder: Path) -> dict[str, str]:
    """Family -> directory below `folder`; the embedded model's directory is empty: each tree has its own."""
    return {"embedded": ""} | {name: str(make(folder / name)) for name, make in MAKERS.items()}
