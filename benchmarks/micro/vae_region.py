"""Decoding an edit's region against the whole picture, by mask ratio.

Held-out scenes of the embedded model, each under a square mask around the garment: inside, the latents are of the same
scene in another garment, outside of the template, as after mask-aware steps. Errors compare the region's pixels with
those of the whole decode. Times are of one picture, in turns. Where a crop would save nothing, all is decoded.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from benchmarks.command import command
from benchmarks.micro.cost_model import opened
from benchmarks.report import Row, Value, print_report
from benchmarks.turns import medians, timed
from core.config import EMBEDDED_MODEL
from entrypoints.calibration.similarity import ssim
from model_executor.models.base import Family
from tools.train_embedded.cases import Case, cases

RATIOS = (0.05, 0.1, 0.2, 0.5)
SIZE, TOKEN = 256, 16
FIRST_SEED = 7_000_000  # of scenes that training and evaluation never saw


@dataclass(frozen=True)
class Edited:
    """An edit before it is decoded. latents: [image tokens, latent width]. active: its token indices."""

    latents: Tensor
    active: Tensor


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, threads=1, rounds=15)
    parser.add_argument("--edits", type=int, default=14, help="edits per mask ratio")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    family, vae = (
        opened(EMBEDDED_MODEL, "float32")[0],
        AutoencoderKL.from_pretrained(EMBEDDED_MODEL, subfolder="vae").float(),
    )
    vae, asked = vae.to(memory_format=torch.channels_last), cases(FIRST_SEED, args.edits)
    rows, result = list[Row](), dict[str, Value](benchmark="vae_region")
    with torch.inference_mode():
        for ratio in RATIOS:
            row, figures = _measure(family, vae, ratio, asked, args.rounds)
            rows.append(row)
            result |= figures
    title = f"Decoding {SIZE}x{SIZE}, {args.edits} edits a ratio, {args.threads} thread(s), float32"
    print_report(title, rows, result, args.output)


def _measure(
    family: Family, vae: AutoencoderKL, ratio: float, asked: Sequence[Case], rounds: int
) -> tuple[Row, dict[str, Value]]:
    edits = [_edit(family, case, ratio) for case in asked]
    pairs = [_pixels(family, edit) for edit in edits]
    errors = [np.abs(region.astype(int) - whole) for region, whole in pairs]
    box = statistics.mean(region.size for region, _ in pairs) / (3 * SIZE**2)
    mean, largest = float(np.mean([error.mean() for error in errors])), max(int(error.max()) for error in errors)
    likeness = [ssim(region, whole) for region, whole in pairs]
    ms = {way: 1e3 * seconds for way, seconds in _times(family, vae, edits[0], rounds).items()}
    line = (
        f"diffusers {ms['diffusers']:.1f} ms, whole {ms['whole']:.1f} ms, region {ms['region']:.1f} ms "
        f"({ms['region'] / ms['whole']:.2f} of whole); error mean {mean:.2f}, max {largest}; "
        f"SSIM mean {statistics.mean(likeness):.4f}, min {min(likeness):.4f}"
    )
    actual = len(edits[0].active) / (SIZE // TOKEN) ** 2
    figures: dict[str, Value] = {f"{way}_ms": value for way, value in ms.items()}
    figures |= {"ssim_mean": statistics.mean(likeness), "ssim_min": min(likeness)}
    figures |= {"error_mean": mean, "error_max": largest}
    named = {f"ratio_{actual:.2f}_{name}": value for name, value in figures.items()}
    return (f"mask ratio {actual:.2f}, box {box:.2f}", line), named


def _edit(family: Family, case: Case, ratio: float) -> Edited:
    active = _square(case, ratio)
    template, painted = (
        family.encode_template(torch.from_numpy(image.copy())) for image in (case.template, case.truth)
    )
    return Edited(template.index_copy(0, active, painted[active]), active)


def _square(case: Case, ratio: float) -> Tensor:
    """Token indices of a square around the garment, of about so large a share of the picture."""
    tokens, side = SIZE // TOKEN, round(ratio**0.5 * SIZE / TOKEN)
    rows, columns = np.nonzero(case.mask)
    top, left = (min(max(round(axis.mean() / TOKEN - side / 2), 0), tokens - side) for axis in (rows, columns))
    grid = torch.arange(tokens * tokens).view(tokens, tokens)
    return grid[top : top + side, left : left + side].flatten()


def _pixels(family: Family, edit: Edited) -> tuple[np.ndarray, np.ndarray]:
    """The box of the edit, decoded alone and cut out of the whole: uint8 [height, width, 3]."""
    region, (left, top, right, bottom) = family.decode_region(edit.latents, edit.active, SIZE, SIZE)
    whole = family.decode(edit.latents, SIZE, SIZE)[top:bottom, left:right]
    return region.numpy(), whole.numpy()


def _times(family: Family, vae: AutoencoderKL, edit: Edited, rounds: int) -> dict[str, float]:
    """Medians of seconds. diffusers: the module's own decode, channels last as ours."""
    shape = (1, vae.config.latent_channels, SIZE // 8, SIZE // 8)
    unpacked = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    ways = {
        "diffusers": timed(lambda: vae.decode(unpacked).sample),
        "whole": timed(lambda: family.decode(edit.latents, SIZE, SIZE)),
        "region": timed(lambda: family.decode_region(edit.latents, edit.active, SIZE, SIZE)),
    }
    return medians(ways, rounds)


if __name__ == "__main__":
    main()
