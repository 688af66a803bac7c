"""How long a request waits for an adapter that is fetched for it: asynchronously, and in turn (LegoDiffusion, 7.4).

An adapter of rank 16 for the denoiser's attention, whose fetch takes half a second longer than from a local disk: for
so long the order to load it is held back. In each round a picture is made with an adapter that was loaded before, with
one that is loaded first, and with one that is loaded while the first steps run (`steps_without_lora`). The wait is what
a picture takes longer than with the first of these: medians over rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Collection, Sequence
from itertools import count
from operator import sub
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.command import command
from benchmarks.report import print_report
from benchmarks.turns import in_turns
from core.config import EMBEDDED_MODEL
from core.messages.engine import AdapterAdded
from core.sampling_params import SamplingParams
from entrypoints.image_engine import Edit, ImageEngine

RANK = 16


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, steps=28, threads=1, rounds=10)
    parser.add_argument("--fetch", type=float, default=0.5, help="seconds that a fetch takes longer")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, ImageEngine(args.model, threads=args.threads) as engine:
        file = write_adapter(Path(folder) / "late.safetensors", Path(args.model))
        bench = Bench(engine, file, args.steps, args.fetch)
        calls = {"loaded": bench.loaded, "in turn": bench.in_turn, "meanwhile": bench.meanwhile}
        seconds = in_turns(calls, args.rounds)
    loaded, *others = (seconds[name] for name in calls)
    wait, late_wait = (statistics.median(map(sub, each, loaded)) for each in others)
    alone, steps = statistics.median(loaded), statistics.median(bench.steps_without)
    rows = [
        ("loaded before", f"{alone:.3f} s"),
        ("loaded first", f"a wait of {wait:.3f} s"),
        ("loaded meanwhile", f"a wait of {late_wait:.3f} s; {steps:g} of {args.steps} steps without"),
    ]
    result = {"benchmark": "adapter_wait", "fetch_s": args.fetch, "steps": args.steps, "steps_without": steps}
    result |= {"loaded_s": alone, "wait_s": wait, "late_wait_s": late_wait}
    print_report(f"a picture with an adapter whose fetch takes {args.fetch:g} s", rows, result, args.output)


class Bench:
    """An engine that fetches slowly. Its methods make a picture, and return the seconds that its caller waits."""

    def __init__(self, engine: ImageEngine, file: Path, num_steps: int, fetch_seconds: float) -> None:
        self._engine, self._file, self._num_steps = engine, file, num_steps
        self._names = (f"late-{number}" for number in count())  # each load has one of its own
        self.steps_without = list[int]()
        additions = engine._engine.services.engines.additions
        load = additions.load_adapter

        async def slowly(model: str, name: str, path: str, keep: Collection[str]) -> AdapterAdded:
            await asyncio.sleep(fetch_seconds)
            return await load(model, name, path, keep)

        additions.load_adapter = slowly  # type: ignore[method-assign]
        self._known = next(self._names)
        engine.load_adapter(self._known, file)
        self._picture(self._known)

    def loaded(self) -> float:
        """The adapter was loaded before."""
        return self._picture(self._known)

    def in_turn(self) -> float:
        """It is loaded first."""
        start, name = time.perf_counter(), next(self._names)
        self._engine.load_adapter(name, self._file)
        self._picture(name)
        return time.perf_counter() - start

    def meanwhile(self) -> float:
        """It is loaded while the first steps run."""
        start, name = time.perf_counter(), next(self._names)
        self._engine.load_adapter(name, self._file, wait=False)
        self._picture(name, steps_without_lora=self._num_steps - 1)
        return time.perf_counter() - start

    def _picture(self, name: str, steps_without_lora: int = 0) -> float:
        start = time.perf_counter()
        sampling = SamplingParams(num_inference_steps=self._num_steps, seed=0, steps_without_lora=steps_without_lora)
        (result,) = self._engine.generate([Edit(prompt="a red shirt", lora=name)], sampling, use_tqdm=False)
        if result.error is not None:
            raise result.error
        if (steps := result.reports[0].steps_without_lora) is not None:
            self.steps_without.append(steps)
        return time.perf_counter() - start


def write_adapter(path: Path, checkpoint: Path) -> Path:
    """A random adapter of the attention's linear layers."""
    generator, tensors = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for weights in (checkpoint / "transformer").glob("*.safetensors"):
        with safe_open(weights, "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        for name, shape in shapes.items():
            if ".attn." in name and len(shape) == 2:
                layer = f"transformer.{name.removesuffix('.weight')}"
                tensors[f"{layer}.lora_A.weight"] = torch.randn(RANK, shape[1], generator=generator) / RANK
                tensors[f"{layer}.lora_B.weight"] = torch.randn(shape[0], RANK, generator=generator) / shape[1]
    save_file(tensors, path)
    return path


if __name__ == "__main__":
    main()
