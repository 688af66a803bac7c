"""Do running edits feel a cold template? Time between their steps while one is primed, against a warm one coming in.

Scheduler and worker in this process: every end of a running step is seen. Eight edits run; newcomers join them one at a
time, in turn with a template whose pages are there and with one that was never seen.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from benchmarks.baselines.edit_app import Upload
from benchmarks.baselines.inline_engine import InlineEdit, InlineEngine
from benchmarks.command import command
from benchmarks.load.pictures import alpha_mask, encode, middle_box, template
from benchmarks.load.workload import prompt
from benchmarks.report import percentile, print_report
from core.config import EMBEDDED_MODEL
from core.request import SamplingParams

ENDLESS_STEPS = 200
SIZE = (256, 256)
MASK = encode(alpha_mask(middle_box(0.1, SIZE), SIZE))


@dataclass
class Gaps:
    """seconds: between two ends of denoising batches. chunks: of priming, by newcomer."""

    seconds: list[float] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)


def begin(engine: InlineEngine, number: int, steps: int, *, mask_aware: bool = True) -> InlineEdit:
    """Start an edit of template `number`, all steps of which are mask-aware or none."""
    upload = Upload(prompt(0), encode(template(number, SIZE)), MASK, is_alpha=True, steps=steps, seed=number)
    sampling = SamplingParams(num_inference_steps=steps, seed=number, full_steps=0, mask_aware=mask_aware)
    return engine.begin(upload, sampling)


def finish(engine: InlineEngine, newcomer: InlineEdit, gaps: Gaps) -> None:
    """Iterate until this edit is done; notes the gaps meanwhile."""
    last, before, done = None, engine.scheduler.pages.num_chunks, False
    while not done:
        done = newcomer in engine.step()
        if last is not None and engine.denoised is not None:
            gaps.seconds.append(engine.denoised - last)
        last = engine.denoised
    gaps.chunks.append(engine.scheduler.pages.num_chunks - before)
    engine.end(newcomer)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, steps=8, rounds=6)
    parser.add_argument("--running", type=int, default=8, help="edits that run all the time")
    args = parser.parse_args(argv)
    engine, unseen = InlineEngine(args.model, args.dtype, args.threads, max_num_seqs=args.running + 1), count(1)
    for running_masked in (False, True):
        running = [begin(engine, 0, ENDLESS_STEPS, mask_aware=running_masked) for _ in range(args.running)]
        warm, cold = Gaps(), Gaps()
        finish(engine, begin(engine, 0, args.steps), Gaps())
        for _ in range(args.rounds):
            finish(engine, begin(engine, 0, args.steps), warm)
            finish(engine, begin(engine, next(unseen), args.steps), cold)
        engine.abort(running)
        kind = "mask-aware" if running_masked else "exact"
        title = (
            f"{args.running} running {kind} edits, newcomers of {args.steps} steps, {args.dtype}, {args.rounds} rounds"
        )
        rows, result = _compared(warm, cold)
        print_report(title, rows, {"benchmark": "prime_gap", "running": kind} | result, args.output)


def _compared(warm: Gaps, cold: Gaps) -> tuple[list[tuple[str, str]], dict[str, float]]:
    warm_p99, cold_p99 = (1e3 * percentile(gaps.seconds, 0.99) for gaps in (warm, cold))
    warm_p50, cold_p50 = (1e3 * statistics.median(gaps.seconds) for gaps in (warm, cold))
    ratio, chunks = cold_p99 / warm_p99, statistics.median(cold.chunks)
    rows = [
        ("gap with a warm newcomer, median / p99", f"{warm_p50:.1f} / {warm_p99:.1f} ms"),
        ("gap with a cold newcomer, median / p99", f"{cold_p50:.1f} / {cold_p99:.1f} ms"),
        ("p99 ratio", f"{ratio:.2f}"),
        ("chunks of a cold newcomer", f"{chunks:.0f}"),
    ]
    return rows, {"warm_gap_p99_ms": warm_p99, "cold_gap_p99_ms": cold_p99, "p99_ratio": ratio, "chunks": chunks}


if __name__ == "__main__":
    main()
