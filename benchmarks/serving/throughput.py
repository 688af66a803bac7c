"""Edits per second without a server, by batch size: ImageEngine.generate against diffusers' own pipeline in batches.

The same edits, checkpoint, dtype and threads for all; the pipeline runs in a process of its own. The batch size is
--max-num-seqs of the engine, and the number of edits in one call of the pipeline.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from benchmarks.baselines.fill_pipeline import FillEdit, FillPipeline
from benchmarks.baselines.systems import FIRST_BLOCK_CACHE
from benchmarks.load.dataset import EditCall, Mix, synthetic
from benchmarks.load.server import ROOT
from benchmarks.report import print_report
from benchmarks.serving.pipeline_loop import DTYPES
from core.config import EMBEDDED_MODEL

BACKENDS = ("stencil", "diffusers", "first-block-cache")
RunEdits = Callable[[Sequence[EditCall]], object]


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    if args.child:
        return _measure_pipeline(args)
    for backend in args.backend:
        for batch_size in args.batch_size:
            seconds = _measure_engine(args, batch_size) if backend == "stencil" else _ask(args, backend, batch_size)
            _report(args, backend, batch_size, seconds)
    return None


def _measure_engine(args: argparse.Namespace, batch_size: int) -> float:
    from entrypoints import Edit, ImageEngine, SamplingParams

    warm_up, calls = _calls(args)
    with ImageEngine(args.model, dtype=args.dtype, threads=args.threads, max_num_seqs=batch_size) as engine:

        def run(calls: Sequence[EditCall]) -> None:
            edits = [Edit(prompt=call.prompt, image=call.image, mask=call.mask) for call in calls]
            params = [SamplingParams(seed=call.seed, num_inference_steps=call.steps) for call in calls]
            for result in engine.generate(edits, params, use_tqdm=False):
                if result.error is not None:
                    raise result.error

        return _time(run, warm_up, calls)


def _ask(args: argparse.Namespace, backend: str, batch_size: int) -> float:
    """A pipeline's seconds, from a process of its own."""
    flags = ["--model", args.model, "--dtype", args.dtype, "--threads", str(args.threads), "--seed", str(args.seed)]
    flags += ["--num-prompts", str(args.num_prompts), "--num-warmups", str(args.num_warmups)]
    flags += ["--num-inference-steps", args.num_inference_steps, "--mask-ratio-dist", args.mask_ratio_dist]
    command = [sys.executable, "-m", "benchmarks.serving.throughput", "--child", "--backend", backend, *flags]
    answer = subprocess.run(
        [*command, "--batch-size", str(batch_size)], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True
    )
    seconds: float = json.loads(answer.stdout.splitlines()[-1])["seconds"]
    return seconds


def _measure_pipeline(args: argparse.Namespace) -> None:
    (backend,), (batch_size,) = args.backend, args.batch_size
    warm_up, calls = _calls(args)
    pipeline = FillPipeline(
        args.model, args.dtype, args.threads, FIRST_BLOCK_CACHE if backend == "first-block-cache" else None
    )

    def run(calls: Sequence[EditCall]) -> None:
        edits = [_fill_edit(call) for call in calls]
        for steps in dict.fromkeys(edit.steps for edit in edits):
            alike = [edit for edit in edits if edit.steps == steps]
            for start in range(0, len(alike), batch_size):
                pipeline(alike[start : start + batch_size])

    print(json.dumps({"seconds": _time(run, warm_up[:batch_size], calls)}))


def _fill_edit(call: EditCall) -> FillEdit:
    with Image.open(io.BytesIO(call.image)) as image, Image.open(io.BytesIO(call.mask or b"")) as mask:
        return FillEdit(call.prompt, image.convert("RGB"), ImageOps.invert(mask.getchannel("A")), call.steps, call.seed)


def _time(run: RunEdits, warm_up: Sequence[EditCall], calls: Sequence[EditCall]) -> float:
    """Seconds of `calls`, after the others."""
    run(warm_up)
    start = time.perf_counter()
    run(calls)
    return time.perf_counter() - start


def _calls(args: argparse.Namespace) -> tuple[list[EditCall], list[EditCall]]:
    mix = Mix(
        mask_ratio_dist=args.mask_ratio_dist,
        template_reuse=args.template_reuse,
        num_inference_steps=args.num_inference_steps,
        sizes=args.sizes,
    )
    calls = synthetic(mix, args.num_warmups + args.num_prompts, np.random.default_rng(args.seed))
    return calls[: args.num_warmups], calls[args.num_warmups :]


def _report(args: argparse.Namespace, backend: str, batch_size: int, seconds: float) -> None:
    rate = args.num_prompts / seconds
    settings: dict[str, Any] = {name: getattr(args, name) for name in ("dtype", "threads", "num_prompts", "seed")}
    settings |= {"num_inference_steps": args.num_inference_steps, "mask_ratio_dist": args.mask_ratio_dist}
    result = {"benchmark": "throughput", "backend": backend, "batch_size": batch_size, "edits_per_s": rate} | settings
    title = f"{backend}, batches of {batch_size}: {args.num_prompts} edits, steps {args.num_inference_steps}"
    print_report(title, [("throughput", f"{rate:.3f} edits/s"), ("duration", f"{seconds:.2f} s")], result)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=["stencil"], help="what edits")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[8], help="most edits that share a step")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="diffusers checkpoint")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="compute type")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--num-prompts", type=int, default=32, help="edits")
    parser.add_argument("--num-warmups", type=int, default=8, help="edits before, not counted")
    parser.add_argument("--num-inference-steps", default="8", help="N, uniform:LOW-HIGH or choice:A,B,..")
    parser.add_argument("--mask-ratio-dist", default="public", help="area: flashps-prod, public, viton or fixed:R")
    parser.add_argument("--template-reuse", default="zipf:1.05", help="zipf:A, unique or fixed:N")
    parser.add_argument("--sizes", default="256x256", help="WxH,WxH,.. of the pictures; the pipeline takes one alone")
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
