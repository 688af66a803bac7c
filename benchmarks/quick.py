"""The few ratios that must not fall, in under three minutes: `make bench-quick`.

Prints them and writes them as JSON; never fails because a figure is low: this machine may be busy. Ratios, since both
sides of each are measured in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.baselines.systems import Setting, running
from benchmarks.evidence.commands import run_command
from benchmarks.load.client import Target, send_in_turn, warm_up
from benchmarks.load.dataset import EditCall, Mix, synthetic
from benchmarks.report import Value, print_report
from core.config import EMBEDDED_MODEL

CLIENTS = 8
SETTING = Setting(EMBEDDED_MODEL)


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    ratios = asyncio.run(_servers(args))
    (line,) = run_command("benchmarks.micro.overheads", "--steps", "200", "--repeats", "100")["lines"]
    steps = run_command("benchmarks.micro.denoiser_step", "--rounds", "3", "--skip-batch")["lines"]
    result: dict[str, Value] = {"benchmark": "quick"} | ratios
    for name, step in zip(("flux_shaped", "embedded"), steps, strict=True):
        result |= {f"{name}_step_x_exact": step["x_exact_0.1"], f"{name}_step_x_diffusers": step["x_diffusers_0.1"]}
    result |= {"schedule_step_ms": line["step_batch_8_ms"], "handover_ms": line["handover_ms"]}
    rows = [(name, f"{value:.3f}") for name, value in result.items() if isinstance(value, float)]
    print_report("ratios that must not fall, overheads that must not rise", rows, result)
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


async def _servers(args: argparse.Namespace) -> dict[str, float]:
    """Throughput and latency of Stencil against diffusers, both servers up, in turns."""
    calls = synthetic(Mix(template_reuse="fixed:4"), 8 + args.rounds * args.num_prompts, np.random.default_rng(0))
    with running("diffusers", SETTING) as theirs, running("stencil", SETTING) as ours:
        targets = {"diffusers": Target(theirs.url), "stencil": Target(ours.url)}
        exact = Target(ours.url, extra={"mask_aware": False})
        for target in (*targets.values(), exact):
            await warm_up(target, calls[:4], 4)
        throughput, latency = list[float](), list[float]()
        for number in range(args.rounds):
            start = 8 + number * args.num_prompts
            part = calls[start : start + args.num_prompts]
            seconds = {name: (await send_in_turn(target, part, CLIENTS)).seconds for name, target in targets.items()}
            throughput.append(seconds["diffusers"] / seconds["stencil"])
            latency.append(await _lone(exact, part[:2]) / await _lone(targets["stencil"], part[:2]))
    return {
        "throughput_x_diffusers": statistics.median(throughput),
        "lone_warm_edit_x_exact": statistics.median(latency),
    }


async def _lone(target: Target, calls: Sequence[EditCall]) -> float:
    run = await send_in_turn(target, calls, 1)
    return statistics.median(outcome.latency for outcome in run.outcomes)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=12, help="edits of a round, on each side")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, in turns")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
