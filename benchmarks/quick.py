"""The few ratios that must not fall, in three to four minutes: `make bench-quick`.

Never fails because a figure is low, since the machine may be busy. Both sides of a ratio are measured in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks.baselines.systems import Setting, running
from benchmarks.command import command
from benchmarks.evidence.results import run_command
from benchmarks.load.client import Target, warm_up
from benchmarks.load.dataset import EditCall, Mix, synthetic
from benchmarks.report import Value, print_report
from benchmarks.turns import in_turns, median_ratio
from core.config import EMBEDDED_MODEL

CLIENTS = 8
SETTING = Setting(EMBEDDED_MODEL)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, rounds=3)
    parser.add_argument("--num-prompts", type=int, default=12, help="edits of a round, on each side")
    args = parser.parse_args(argv)
    result: dict[str, Value] = {"benchmark": "quick", **_servers(args)}
    (line,) = run_command("benchmarks.micro.overheads", "--steps", "200", "--repeats", "100")["lines"]
    steps = run_command("benchmarks.micro.denoiser_step", "--rounds", "3", "--skip-batch")["lines"]
    for name, step in zip(("flux_shaped", "embedded"), steps, strict=True):
        result |= {f"{name}_step_x_exact": step["x_exact_0.1"], f"{name}_step_x_diffusers": step["x_diffusers_0.1"]}
    result |= {"schedule_step_ms": line["step_batch_8_ms"], "handover_ms": line["handover_ms"]}
    rows = [(name, f"{value:.3f}") for name, value in result.items() if isinstance(value, float)]
    print_report("ratios that must not fall, overheads that must not rise", rows, result, args.output)


def _servers(args: argparse.Namespace) -> dict[str, Value]:
    """Throughput and latency of Stencil against diffusers, both servers up, in turns."""
    calls = synthetic(Mix(template_reuse="fixed:4"), 4 + args.num_prompts, np.random.default_rng(0))
    first, calls = calls[:4], calls[4:]
    with running("diffusers", SETTING) as theirs, running("stencil", SETTING) as ours:
        targets = {"diffusers": Target(theirs.url), "warm": Target(ours.url)}
        targets["exact"] = Target(ours.url, extra={"mask_aware": False})
        for target in targets.values():
            asyncio.run(warm_up(target, first, 4))
        many = {name: partial(_seconds, targets[name], calls, CLIENTS) for name in ("diffusers", "warm")}
        lone = {f"lone {name}": partial(_seconds, targets[name], calls[:2], 1) for name in ("exact", "warm")}
        seconds = in_turns(many | lone, args.rounds, warm_ups=0)
    return {
        "throughput_x_diffusers": median_ratio(seconds["diffusers"], seconds["warm"]),
        "lone_warm_edit_x_exact": median_ratio(seconds["lone exact"], seconds["lone warm"]),
    }


def _seconds(target: Target, calls: Sequence[EditCall], clients: int) -> float:
    """Of all edits; the median of each where they are sent one by one."""
    run = asyncio.run(warm_up(target, calls, clients))
    return run.seconds if clients > 1 else statistics.median(run.latencies)


if __name__ == "__main__":
    main()
