"""Edits per second without a server, by batch size: ImageEngine.generate against diffusers' own pipeline in batches.

The same edits, checkpoint, dtype and threads for all; the pipeline runs in a process of its own. The batch size is
--max-num-seqs of the engine, and the number of edits in one call of the pipeline.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.baselines.systems import FIRST_BLOCK_CACHE
from benchmarks.command import command
from benchmarks.load.dataset import EditCall, Mix, synthetic
from benchmarks.report import print_report
from benchmarks.serving.pipeline_loop import pipeline_process, run_edits
from core.config import EMBEDDED_MODEL

BACKENDS = {"stencil": None, "diffusers": None, "first-block-cache": FIRST_BLOCK_CACHE}
"""Name -> threshold of step skipping."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, edits=32, seed=0)
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=["stencil"], help="what edits")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[8], help="most edits that share a step")
    parser.add_argument("--num-warmups", type=int, default=8, help="edits before, not counted")
    parser.add_argument("--num-inference-steps", dest="steps", default="8", help="N, uniform:LOW-HIGH or choice:A,B,..")
    parser.add_argument("--mask-ratio-dist", default="public", help="area: flashps-prod, public, viton or fixed:R")
    parser.add_argument("--template-reuse", default="zipf:1.05", help="zipf:A, unique or fixed:N")
    parser.add_argument("--sizes", default="256x256", help="WxH,WxH,.. of the pictures; the pipeline takes one alone")
    args = parser.parse_args(argv)
    mix = Mix(args.mask_ratio_dist, args.template_reuse, num_inference_steps=args.steps, sizes=args.sizes)
    calls = synthetic(mix, args.num_warmups + args.edits, np.random.default_rng(args.seed))
    warm_up, calls = calls[: args.num_warmups], calls[args.num_warmups :]
    for backend in args.backend:
        for batch_size in args.batch_size:
            measure = _measure_engine if backend == "stencil" else _measure_pipeline
            _report(args, backend, batch_size, measure(args, backend, batch_size, warm_up, calls))


def _measure_engine(
    args: argparse.Namespace, backend: str, batch_size: int, warm_up: Sequence[EditCall], calls: Sequence[EditCall]
) -> float:
    from entrypoints import Edit, ImageEngine, SamplingParams

    with ImageEngine(args.model, dtype=args.dtype, threads=args.threads, max_num_seqs=batch_size) as engine:

        def run(calls: Sequence[EditCall]) -> float:
            edits = [Edit(prompt=call.prompt, image=call.image, mask=call.mask) for call in calls]
            params = [SamplingParams(seed=call.seed, num_inference_steps=call.steps) for call in calls]
            start = time.perf_counter()
            for result in engine.generate(edits, params, use_tqdm=False):
                if result.error is not None:
                    raise result.error
            return time.perf_counter() - start

        run(warm_up)
        return run(calls)


def _measure_pipeline(
    args: argparse.Namespace, backend: str, batch_size: int, warm_up: Sequence[EditCall], calls: Sequence[EditCall]
) -> float:
    with pipeline_process(args.model, args.dtype, args.threads, BACKENDS[backend]) as pipeline:
        pipeline.submit(run_edits, warm_up[:batch_size], batch_size).result()
        return pipeline.submit(run_edits, calls, batch_size).result()


def _report(args: argparse.Namespace, backend: str, batch_size: int, seconds: float) -> None:
    rate = args.edits / seconds
    result = {"benchmark": "throughput", "backend": backend, "batch_size": batch_size, "edits_per_s": rate}
    result |= {"dtype": args.dtype, "threads": args.threads, "num_prompts": args.edits, "seed": args.seed}
    result |= {"num_inference_steps": args.steps, "mask_ratio_dist": args.mask_ratio_dist}
    title = f"{backend}, batches of {batch_size}: {args.edits} edits, steps {args.steps}"
    rows = [("throughput", f"{rate:.3f} edits/s"), ("duration", f"{seconds:.2f} s")]
    print_report(title, rows, result, args.output)


if __name__ == "__main__":
    main()
