"""An edit by a server's own processes: the worker that starts on the device, finds its memory for pages and pins the
host's, against the same edit by processes on the CPU.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.correctness import MAKERS, difference, soft_picture
from benchmarks.gpu.local_engine import Pixels
from benchmarks.gpu.report import Figures
from core.config import EMBEDDED_MODEL
from core.request import SamplingParams

NAME = "served"
SIDE = 256
STEPS = 4


def run(bench: Bench) -> None:
    """Each picture twice, so that the second edit finds its pages."""
    with tempfile.TemporaryDirectory() as folder:
        embedded = Path(EMBEDDED_MODEL)
        checkpoint = embedded if bench.size.has_embedded else MAKERS["flux-fill"](Path(folder) / "flux-fill")
        painted, figures = _paint(checkpoint, str(bench.device))
        bench.report.put(NAME, **figures)
        expected = painted if bench.device.type == "cpu" else _paint(checkpoint, "cpu")[0]
    bench.report.put(NAME, **difference(painted, expected))


def _paint(checkpoint: Path, device: str) -> tuple[list[Pixels], Figures]:
    # Needs packages that no other section does.
    from entrypoints.image_engine import Edit, ImageEngine

    started = time.monotonic()
    with ImageEngine(str(checkpoint), device=device, dtype="float32") as engine:
        ready_s = time.monotonic() - started
        edit = Edit(prompt="a red striped shirt", image=soft_picture(SIDE, 0), mask_image=_mask())
        sampling = SamplingParams(num_inference_steps=STEPS, seed=7)
        results = [engine.generate([edit], sampling, use_tqdm=False)[0] for _ in range(2)]
        page_bytes = engine.device_page_bytes
    for error in (result.error for result in results if result.error is not None):
        raise error
    second = results[1].reports[0]
    figures = {"ready_s": ready_s, "device_page_gb": page_bytes / 1e9, "second_edit": f"{second.cache}, {second.tier}"}
    return [np.asarray(result.images[0].convert("RGB")) for result in results], figures


def _mask() -> Pixels:
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[80:160, 80:160] = 255
    return mask
