"""Decoding an edit's region against the whole picture, by mask ratio.

Edits of held-out scenes by the embedded model, each under a square mask around the garment; outside of it the latents
are the template's, as after mask-aware steps. Errors are those of the region's pixels to the same pixels of the whole
decode. Times are of one picture, the three ways in turns, with a worker's memory settings; figures are medians. A ratio
at which a crop would save nothing is decoded whole.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from benchmarks.command import command
from benchmarks.report import Value, print_report
from benchmarks.turns import medians, timed
from core.config import EMBEDDED_MODEL, ModelConfig
from engine.similarity import ssim
from model_executor.models.base import Family, Row, Sample
from model_executor.resident import ResidentModels, quiet_libraries
from tools.train_embedded.cases import Case, cases

RATIOS = (0.05, 0.1, 0.2, 0.5)
SIZE = 256
TOKEN = 16
TEXT_TOKENS = 24
STEPS = 8
FIRST_SEED = 7_000_000
"""Of scenes that training and evaluation never saw."""


@dataclass(frozen=True)
class Edited:
    """An edit before it is decoded. latents: [image tokens, latent width]. active: its token indices."""

    template: Tensor
    latents: Tensor
    active: Tensor


@dataclass(frozen=True)
class Measured:
    """seconds: medians by way of decoding. mean, largest: absolute errors of pixel values, of 255. ssim: of each edit's
    box."""

    ratio: float
    box: float
    seconds: dict[str, float]
    mean: float
    largest: int
    ssim: list[float]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, threads=1, rounds=15)
    parser.add_argument("--edits", type=int, default=14, help="edits per mask ratio")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    quiet_libraries()
    models = ResidentModels.open([ModelConfig(served_model_name="embedded", dtype="float32")])
    models.load_all()
    models.warm_up()
    family, vae = models.families["embedded"], AutoencoderKL.from_pretrained(EMBEDDED_MODEL, subfolder="vae").float()
    vae = vae.to(memory_format=torch.channels_last)
    asked = cases(FIRST_SEED, args.edits)
    with torch.inference_mode():
        measured = [_measure(family, vae, ratio, asked, args.rounds) for ratio in RATIOS]
    _report(args, measured)


def _measure(family: Family, vae: AutoencoderKL, ratio: float, asked: Sequence[Case], repeats: int) -> Measured:
    edits = [_edit(family, case, _square(case, ratio), seed) for seed, case in enumerate(asked)]
    pairs = [_pixels(family, edit) for edit in edits]
    differences = [np.abs(region.astype(int) - whole) for region, whole in pairs]
    return Measured(
        ratio=len(edits[0].active) / (SIZE // TOKEN) ** 2,
        box=statistics.mean(region.size for region, _ in pairs) / (3 * SIZE**2),
        seconds=_times(family, vae, edits[0], repeats),
        mean=float(np.mean([difference.mean() for difference in differences])),
        largest=max(int(difference.max()) for difference in differences),
        ssim=[ssim(region, whole) for region, whole in pairs],
    )


def _square(case: Case, ratio: float) -> Tensor:
    """Token indices of a square around the garment, of about so large a share of the picture."""
    tokens, side = SIZE // TOKEN, round(ratio**0.5 * SIZE / TOKEN)
    rows, columns = np.nonzero(case.mask)
    top, left = (min(max(round(axis.mean() / TOKEN - side / 2), 0), tokens - side) for axis in (rows, columns))
    grid = torch.arange(tokens * tokens).view(tokens, tokens)
    return grid[top : top + side, left : left + side].flatten()


def _edit(family: Family, case: Case, active: Tensor, seed: int) -> Edited:
    """All steps of an edit, exact; then the template's latents wherever it is not active."""
    template, mask = torch.from_numpy(case.template.copy()), torch.zeros(SIZE // TOKEN, SIZE // TOKEN)
    mask.view(-1)[active] = 1
    pixels = mask.repeat_interleave(TOKEN, 0).repeat_interleave(TOKEN, 1).to(torch.uint8)
    text = family.encode_text(case.prompt, TEXT_TOKENS)
    image = family.encode_image(template, pixels, seed=seed, num_inference_steps=STEPS, num_denoising_steps=STEPS)
    latents, state = image.latents, image.state
    for step, sigma in enumerate(image.sigmas[:-1]):
        row = Row(
            latents=latents,
            condition=image.condition,
            prompt_embeds=text.prompt_embeds,
            pooled_prompt_embeds=text.pooled_prompt_embeds,
            sigma=sigma,
            guidance_scale=1.0,
            grid=family.grid(SIZE, SIZE),
        )
        sample = Sample(
            latents=latents, outside=image.outside, sigmas=image.sigmas, step=step, state=state, grid=row.grid
        )
        latents, state = family.advance(sample, family.combine_guidance(family.predict([row]), 1.0))
    clean = family.encode_template(template)
    return Edited(template, clean.index_copy(0, active, latents[active]), active)


def _pixels(family: Family, edit: Edited) -> tuple[np.ndarray, np.ndarray]:
    """The box of the edit, decoded alone and cut out of the whole: uint8 [height, width, 3]."""
    region, (left, top, right, bottom) = _decode_region(family, edit)
    whole = family.decode(edit.latents, SIZE, SIZE)[top:bottom, left:right]
    return region.numpy(), whole.numpy()


def _decode_region(family: Family, edit: Edited) -> tuple[Tensor, tuple[int, int, int, int]]:
    return family.decode_region(edit.latents, edit.active, SIZE, SIZE)


def _times(family: Family, vae: AutoencoderKL, edit: Edited, repeats: int) -> dict[str, float]:
    """Medians of seconds. diffusers: the module's own decode, channels last as ours."""
    config, side = vae.config, SIZE // 8
    shape = (1, config.latent_channels, side, side)
    unpacked = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    ways = {
        "diffusers": timed(lambda: vae.decode(unpacked).sample),
        "whole": timed(lambda: family.decode(edit.latents, SIZE, SIZE)),
        "region": timed(lambda: _decode_region(family, edit)),
    }
    return medians(ways, repeats)


def _report(args: argparse.Namespace, measured: Sequence[Measured]) -> None:
    rows = [(f"mask ratio {m.ratio:.2f}, box {m.box:.2f}", _line(m)) for m in measured]
    result: dict[str, Value] = {}
    for m in measured:
        name = f"ratio_{m.ratio:.2f}"
        result |= {f"{name}_{way}_ms": 1000 * seconds for way, seconds in m.seconds.items()}
        result |= {f"{name}_ssim_mean": statistics.mean(m.ssim), f"{name}_ssim_min": min(m.ssim)}
        result |= {f"{name}_error_mean": m.mean, f"{name}_error_max": m.largest}
    title = f"Decoding {SIZE}x{SIZE}, {args.edits} edits a ratio, {args.threads} thread(s), float32"
    print_report(title, rows, result, args.output)


def _line(m: Measured) -> str:
    diffusers, whole, region = (1000 * m.seconds[way] for way in ("diffusers", "whole", "region"))
    return (
        f"diffusers {diffusers:.1f} ms, whole {whole:.1f} ms, region {region:.1f} ms ({region / whole:.2f} of whole); "
        f"error mean {m.mean:.2f}, max {m.largest}; SSIM mean {statistics.mean(m.ssim):.4f}, min {min(m.ssim):.4f}"
    )


if __name__ == "__main__":
    main()
