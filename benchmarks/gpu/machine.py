"""The ceilings of a machine, beside which all other figures are read: bandwidths, products, launches."""

from __future__ import annotations

import time
from functools import partial

import torch

from benchmarks.gpu.bench import Bench, Call
from benchmarks.gpu.report import Figures

LAUNCHES = 1000
REPEATS = 4  # of a copy or product in one measurement, so that its launch counts little


@torch.inference_mode()
def run(bench: Bench) -> None:
    """Free memory, copies on the device and from the host, a product in the steps' dtype, and launches."""
    put, size = partial(bench.report.put, "machine"), bench.size
    put(free_gb=bench.free_bytes / 1e9 if bench.device.type == "cuda" else None)
    put(**_copies(bench))
    left, right = (bench.draw(size.product_side, size.product_side) for _ in range(2))
    seconds = bench.median(lambda: [left @ right for _ in range(REPEATS)]) / REPEATS
    put(product_tflop_per_s=2 * size.product_side**3 / seconds / 1e12)
    put(launch_us=_launch_us(bench))


def _copies(bench: Bench) -> Figures:
    """Bandwidth of copies on the device, which counts bytes read and written, and from pinned host memory."""
    nbytes = bench.size.copy_bytes
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    host = torch.empty(nbytes // 8, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    part = target[: len(host)]
    calls: dict[str, Call] = {
        "copy": lambda: [target.copy_(source) for _ in range(REPEATS)],
        "upload": lambda: [part.copy_(host, non_blocking=True) for _ in range(REPEATS)],
    }
    seconds = bench.medians(calls)
    return {
        "copy_gb_per_s": 2 * REPEATS * nbytes / seconds["copy"] / 1e9,
        "upload_gb_per_s": REPEATS * len(host) / seconds["upload"] / 1e9,
    }


def _launch_us(bench: Bench) -> float:
    """The host's time to launch a small kernel from Python."""
    number = bench.draw(1)
    number.add_(1)
    bench.wait()
    started = time.perf_counter()
    for _ in range(LAUNCHES):
        number.add_(1)
    seconds = time.perf_counter() - started
    bench.wait()
    return 1e6 * seconds / LAUNCHES
