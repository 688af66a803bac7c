"""The sections on correctness: edits against a CPU's, an edit by a server's processes, and tests.

The CPU computes with PyTorch's operators. Every dtype is compared with a CPU's in the same dtype: before PyTorch 2.12,
noise that is drawn in bfloat16 has other values than in float32.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.compare.checkpoints import MAKERS
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.graphs import GraphChoice, model_options
from benchmarks.gpu.local_engine import LocalEngine, Pixels
from benchmarks.gpu.report import Figures
from benchmarks.load.server import ROOT
from core.config import EMBEDDED_MODEL, CacheConfig, KernelChoice, ModelConfig, Offload
from core.sampling_params import SamplingParams

STEPS = 4
SIDES = (96, 128)  # pixels of the pictures, which share their steps; the embedded model gets twice as many
GUIDANCE = 4.0
CACHE_BYTES = 2**30

SERVED_SIDE = 256  # px

KERNEL_TESTS = ("test_triton_kernels", "test_unet_kernels")
KERNELS = "tests/model_executor/kernels"
GPU_MARK = "pytest.mark.gpu"
"""The mark in files of tests that need a GPU."""
TEST_SECONDS = 150.0
PROCESSES = 4  # that run the tests side by side, where pytest-xdist is there
TEST_LINES = 15  # kept of the end of the tests' output


def edits(bench: Bench) -> None:
    """Checkpoint by checkpoint; each figure is of all its pictures. Raises ExceptionGroup of those that failed."""
    figures: dict[str, Figures] = {}
    broken: list[Exception] = []
    with tempfile.TemporaryDirectory() as folder, _no_tf32():
        for name in bench.size.checkpoints:
            try:
                figures[name] = _compare(small_checkpoint(name, Path(folder)), bench, 2 if name == "embedded" else 1)
            except Exception as error:  # one family that fails must not cost the others their figures
                broken.append(error)
            bench.report.put("correctness", checkpoints=figures)
            bench.clear()
    if broken:
        raise ExceptionGroup("checkpoints that failed", broken)


def small_checkpoint(name: str, folder: Path) -> Path:
    """The embedded model, or random weights of a family."""
    return Path(EMBEDDED_MODEL) if name == "embedded" else MAKERS[name](folder / name)


def _compare(checkpoint: Path, bench: Bench, scale: int) -> Figures:
    figures: Figures = {}
    for dtype in ("float32", "bfloat16"):
        expected = edit_pictures(checkpoint, "cpu", dtype, scale)
        painted = edit_pictures(checkpoint, str(bench.device), dtype, scale, bench.graphs)
        figures[dtype] = {way: difference(pictures, expected[way]) for way, pictures in painted.items()}
    return figures


def edit_pictures(
    checkpoint: Path,
    device: str,
    dtype: str,
    scale: int,
    graphs: GraphChoice | None = None,
    offload: Offload = "none",
) -> dict[str, list[Pixels]]:
    """Exact and mask-aware edits of pictures of two sizes, which share steps; on a device pages lie in its memory."""
    templates = [soft_picture(scale * side, seed) for seed, side in enumerate(SIDES)]
    cache = CacheConfig(device_bytes=CACHE_BYTES if device != "cpu" else 0, host_bytes=CACHE_BYTES)
    options: dict[str, Any] = {"kernels": _kernels(device), "graphs": graphs, "offload": offload}
    with closing(LocalEngine(checkpoint, device, dtype, cache, **options)) as engine:
        return {
            way: engine.edit(
                templates,
                SamplingParams(num_inference_steps=STEPS, guidance_scale=GUIDANCE, seed=7, mask_aware=is_mask_aware),
            )
            for way, is_mask_aware in (("exact", False), ("mask-aware", True))
        }


def _kernels(device: str) -> KernelChoice:
    return "torch" if device == "cpu" else "auto"


def difference(painted: list[Pixels], expected: list[Pixels]) -> Figures:
    """Differences of pixel values, in levels of 255."""
    pairs = zip(painted, expected, strict=True)
    errors = np.concatenate([np.abs(ours.astype(int) - theirs).ravel() for ours, theirs in pairs])
    return {
        "max_levels": int(errors.max()),
        "mean_levels": float(errors.mean()),
        "share_within_1": float((errors <= 1).mean()),
    }


def soft_picture(side: int, seed: int) -> Pixels:
    """A picture of squares of 16 px in random colours: noise in every pixel would hide differences."""
    coarse = np.random.default_rng(seed).integers(0, 256, (side // 16, side // 16, 3)).astype(np.uint8)
    return np.ascontiguousarray(coarse.repeat(16, axis=0).repeat(16, axis=1))


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Convolutions in full float32, which cuDNN rounds to 10 bits by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


# -------------------------------------------------------------------------------------------------------------- served


def served(bench: Bench) -> None:
    """An edit by a server's own processes, against the same on the CPU: the worker starts on the device, sizes its
    memory for pages and pins the host's."""
    with tempfile.TemporaryDirectory() as folder:
        name = bench.size.checkpoints[0]
        checkpoint = small_checkpoint(name, Path(folder))
        painted, figures = _serve(checkpoint, str(bench.device), model_options(bench.graphs))
        bench.report.put("served", **figures)
        expected = painted if bench.device.type == "cpu" else _serve(checkpoint, "cpu", {})[0]
    bench.report.put("served", **difference(painted, expected))


def _serve(checkpoint: Path, device: str, options: Mapping[str, Any]) -> tuple[list[Pixels], Figures]:
    """Edits the picture twice; the second edit finds its pages. options: of the ModelConfig."""
    # Needs packages that no other section does.
    from entrypoints.image_engine import Edit, ImageEngine

    mask = np.zeros((SERVED_SIDE, SERVED_SIDE), np.uint8)
    mask[80:160, 80:160] = 255
    started = time.monotonic()
    model = ModelConfig(model=str(checkpoint), device=device, dtype="float32", kernels=_kernels(device), **options)
    with ImageEngine(models=[model]) as engine:
        ready_s = time.monotonic() - started
        edit = Edit(prompt="a red striped shirt", image=soft_picture(SERVED_SIDE, 0), mask_image=mask)
        sampling = SamplingParams(num_inference_steps=STEPS, seed=7)
        results = [engine.generate([edit], sampling, use_tqdm=False)[0] for _ in range(2)]
        page_bytes = engine.device_page_bytes
    for error in (result.error for result in results if result.error is not None):
        raise error
    second = results[1].reports[0]
    figures = {"ready_s": ready_s, "device_page_gb": page_bytes / 1e9, "second_edit": f"{second.cache}, {second.tier}"}
    return [np.asarray(result.images[0].convert("RGB")) for result in results], figures


# --------------------------------------------------------------------------------------------------------------- tests


def kernel_tests(bench: Bench) -> None:
    """The project's tests of kernels and of what needs a GPU; without a GPU they are only collected. Warnings are not
    errors here: another PyTorch may have others. Raises subprocess.TimeoutExpired where they hang."""
    has_gpu = bench.device.type == "cuda"
    chosen = ["-m", "not slow", "-k", " or ".join((*KERNEL_TESTS, "gpu"))]  # by file or mark: others need no GPU
    together = ["-n", str(PROCESSES), "--dist", "loadgroup"] if find_spec("xdist") and has_gpu else []
    options = ["-q", *chosen, "-W", "default", "-p", "no:cacheprovider", *together]
    command = [sys.executable, "-m", "pytest", *options, *files_of_tests(), *([] if has_gpu else ["--collect-only"])]
    environment = os.environ | ({"TRITON_INTERPRET": "0"} if has_gpu else {})
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TEST_SECONDS
    )
    said = (done.stdout + done.stderr).rstrip().splitlines()[-TEST_LINES:]
    bench.report.put("kernel_tests", passed=done.returncode == 0, has_run=has_gpu, said="\n".join(said))


def files_of_tests() -> list[str]:
    """The files of tests to run: of the kernels, and of all that has tests for a GPU."""
    found = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if GPU_MARK in path.read_text())
    return [*(f"{KERNELS}/{name}.py" for name in KERNEL_TESTS), *(str(path.relative_to(ROOT)) for path in found)]
