"""How long a request waits for an adapter that is fetched for it: asynchronously, and in turn (LegoDiffusion, 7.4).

An adapter of rank 16 for the denoiser's attention, whose fetch takes half a second longer than from a local disk: so
long the order to load it is held back. In each round a picture is made with the adapter loaded, with the load and the
picture in turn, and with the picture begun while it loads (`steps_without_lora`). The wait is what a picture takes
longer than with the adapter loaded.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.command import command
from benchmarks.report import print_report
from benchmarks.turns import in_turns, timed
from core.config import EMBEDDED_MODEL
from core.sampling_params import SamplingParams
from entrypoints.image_engine import Edit, EditResult, ImageEngine
from model_executor.checkpoint.location import locate

RANK = 16
NAME = "late"


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, steps=28, threads=1, rounds=10)
    parser.add_argument("--fetch", type=float, default=0.5, help="seconds that a fetch takes longer")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, ImageEngine(args.model, threads=args.threads) as engine:
        file = write_adapter(Path(folder) / "late.safetensors", Path(args.model))
        bench = Bench(engine, file, args.steps, args.fetch)
        seconds = in_turns({name: timed(call) for name, call in bench.calls.items()}, args.rounds)
    loaded, in_turn, beside = (statistics.median(seconds[name]) for name in bench.calls)
    steps = statistics.median(bench.steps_without)
    rows = [
        ("with the adapter loaded", f"{loaded:.3f} s"),
        ("fetched first", f"{in_turn:.3f} s, a wait of {in_turn - loaded:.3f} s"),
        ("fetched meanwhile", f"{beside:.3f} s, a wait of {beside - loaded:.3f} s; {steps:g} of {args.steps} steps without"),
    ]
    result = {
        "benchmark": "adapter_wait",
        "fetch_s": args.fetch,
        "steps": args.steps,
        "loaded_s": loaded,
        "wait_s": in_turn - loaded,
        "late_wait_s": beside - loaded,
        "steps_without": steps,
    }
    print_report("the wait for an adapter", rows, result, args.output)


class Bench:
    """An engine that fetches slowly."""

    def __init__(self, engine: ImageEngine, file: Path, num_steps: int, fetch_seconds: float) -> None:
        self._engine, self._file, self._num_steps = engine, file, num_steps
        self.steps_without = list[int]()
        self.calls: dict[str, Callable[[], object]] = {
            "loaded": self._loaded,
            "in turn": self._in_turn,
            "meanwhile": self._meanwhile,
        }
        additions = engine._engine.services.router.additions
        load = additions.load_adapter

        async def slowly(*asked: Any) -> Any:
            await asyncio.sleep(fetch_seconds)
            return await load(*asked)

        additions.load_adapter = slowly  # type: ignore[method-assign]
