"""Whether edits on the device are those of a CPU in float32: of the embedded model, and of every family with random
weights, exact and mask-aware.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.local_engine import LocalEngine, Pixels
from benchmarks.gpu.report import Figures
from core.config import EMBEDDED_MODEL, CacheConfig
from core.request import SamplingParams
from tools.random_checkpoints import make_flux, make_flux_fill, make_qwen_edit, make_sd3
from tools.random_unet_checkpoints import make_sd, make_sdxl

NAME = "correctness"
STEPS = 4
SIDES = (96, 128)
"""Of the pictures, which share their steps, in pixels; of the embedded model twice as many."""
GUIDANCE = 4.0
DEVICE_BYTES = 2**30

MAKERS: dict[str, Callable[[Path], Path]] = {
    "flux-fill": lambda path: make_flux_fill(path, guidance_embeds=True),
    "flux": lambda path: make_flux(path, guidance_embeds=True),
    "sd3": make_sd3,
    "qwen-image-edit": make_qwen_edit,
    "sd": make_sd,
    "sdxl": make_sdxl,
}


def run(bench: Bench) -> None:
    """One checkpoint after the other; each figure is of all its pictures. Raises ExceptionGroup of those that broke."""
    figures: dict[str, Figures] = {}
    broken: list[Exception] = []
    with tempfile.TemporaryDirectory() as folder, _no_tf32():
        for name in (*(["embedded"] if bench.size.has_embedded else []), *bench.size.families):
            path = Path(EMBEDDED_MODEL) if name == "embedded" else MAKERS[name](Path(folder) / name)
            try:
                figures[name] = _compare(path, bench, scale=2 if name == "embedded" else 1)
            except Exception as error:  # the run's edge: one family that breaks must not cost the others their figures
                broken.append(error)
            bench.report.put(NAME, checkpoints=figures)
            bench.clear()
    if broken:
        raise ExceptionGroup("checkpoints that broke", broken)


def _compare(checkpoint: Path, bench: Bench, scale: int) -> Figures:
    device = str(bench.device)
    expected = _edit(checkpoint, "cpu", "float32", scale)
    return {
        dtype: {way: difference(pictures, expected[way]) for way, pictures in painted.items()}
        for dtype, painted in ((dtype, _edit(checkpoint, device, dtype, scale)) for dtype in ("float32", "bfloat16"))
    }


def _edit(checkpoint: Path, device: str, dtype: str, scale: int) -> dict[str, list[Pixels]]:
    """Exact and mask-aware edits of pictures of two sizes, which share steps; on a device pages lie in its memory."""
    cache = CacheConfig(device_bytes=DEVICE_BYTES if device != "cpu" else 0, host_bytes=DEVICE_BYTES)
    with closing(LocalEngine(checkpoint, device, dtype, cache)) as engine:
        return {
            "exact" if not is_masked else "mask-aware": engine.edit(
                [soft_picture(scale * side, seed) for seed, side in enumerate(SIDES)],
                SamplingParams(num_inference_steps=STEPS, guidance_scale=GUIDANCE, seed=7, mask_aware=is_masked),
            )
            for is_masked in (False, True)
        }


def difference(painted: list[Pixels], expected: list[Pixels]) -> Figures:
    """Of pixel values, in levels of 255."""
    errors = np.concatenate(
        [np.abs(ours.astype(int) - theirs).ravel() for ours, theirs in zip(painted, expected, strict=True)]
    )
    return {
        "max_levels": int(errors.max()),
        "mean_levels": float(errors.mean()),
        "share_within_1": float((errors <= 1).mean()),
    }


def soft_picture(side: int, seed: int) -> Pixels:
    """Soft shapes: a random picture would hide nothing, and look like none."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (side // 16, side // 16, 3)).astype(np.uint8)
    return np.ascontiguousarray(coarse.repeat(16, axis=0).repeat(16, axis=1))


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Convolutions in float32 proper, which cuDNN rounds to 10 bits unless told not to."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
