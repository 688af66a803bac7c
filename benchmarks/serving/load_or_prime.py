"""Load or prime: edits whose pages lie on disk, under the cost model's choice and with either choice forced.

Scheduler and worker in this process. Memory holds one template, and edits of two take turns, so that every edit finds
its pages on disk only. Whatever is chosen, the picture is the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.baselines.inline_engine import MAX_NUM_SEQS, InlineEngine
from benchmarks.command import command
from benchmarks.report import print_report
from benchmarks.serving.prime_gap import Gaps, begin, finish
from benchmarks.turns import medians, timed
from core.config import EMBEDDED_MODEL, CacheConfig
from core.handles import Tier
from core.priming import TemplateInfo

DISK_BYTES = 1024**3
TEMPLATES = (1, 2)

Choice = Callable[[TemplateInfo, Tier, int], bool]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, steps=8, rounds=11)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        cache = CacheConfig(disk_bytes=DISK_BYTES, directory=folder)
        engine = InlineEngine(args.model, args.dtype, args.threads, cache, MAX_NUM_SEQS, num_templates=1)
        for number in sorted(2 * TEMPLATES):  # used twice: they go to disk
            finish(engine, begin(engine, number, args.steps), Gaps())
        own: Choice = engine.scheduler.pages.load_wins
        choices: dict[str, Choice] = {"load": lambda *_: True, "prime": lambda *_: False, "cost model": own}
        ways = {name: timed(partial(_edit_both, engine, choice, args.steps)) for name, choice in choices.items()}
        seconds = medians(ways, args.rounds)  # the round that does not count teaches the cost model what a load takes
    ms = {name: 1e3 * taken / len(TEMPLATES) for name, taken in seconds.items()}
    ratio = ms["cost model"] / min(ms["load"], ms["prime"])
    rows = [(f"{name}, median", f"{value:.1f} ms") for name, value in ms.items()]
    rows.append(("cost model's choice against the better", f"{ratio:.3f}"))
    title = f"edits of {args.steps} steps whose pages lie on disk, {args.dtype}, {args.rounds} rounds"
    result = {f"{name.replace(' ', '_')}_ms": value for name, value in ms.items()}
    print_report(title, rows, {"benchmark": "load_or_prime", **result, "ratio": ratio}, args.output)


def _edit_both(engine: InlineEngine, choice: Choice, steps: int) -> None:
    engine.scheduler.pages.load_wins = choice
    for number in TEMPLATES:
        finish(engine, begin(engine, number, steps), Gaps())


if __name__ == "__main__":
    main()
