"""Twelve workflows in one server, as in LegoDiffusion's evaluation (`lego_layout`): memory, and steps that they share.

Requests of all workflows come at once: their pictures must be those of the same requests alone, and steps that requests
of several workflows share are counted. What weights take is what all processes take beyond a server whose weights are
small. It is compared with the files of distinct components, and with those of twelve servers. Nothing else is cached.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np

from benchmarks.command import command
from benchmarks.load.client import Target, warm_up
from benchmarks.load.dataset import EditCall, Mix, generations
from benchmarks.load.process_tree import pss_bytes
from benchmarks.load.server import ready_server
from benchmarks.report import Value, print_report
from benchmarks.serving.lego_layout import LARGE, SMALL, Layout, write


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, threads=1, steps=8, rounds=2)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        small, large = write(Path(folder) / "small", SMALL), write(Path(folder) / "large", LARGE)
        _, less = served(small, args)
        result, more = served(large, args)
    distinct = large.distinct_bytes - small.distinct_bytes
    separate = large.separate_bytes - small.separate_bytes
    ratio = (more - less) / distinct
    result |= {"taken_mb": (more - less) / 1e6, "distinct_mb": distinct / 1e6, "separate_mb": separate / 1e6}
    result["x_distinct"] = ratio
    rows = [
        ("memory of weights", f"{(more - less) / 1e6:.0f} MB, {ratio:.3f} of the {distinct / 1e6:.0f} MB of files"),
        ("files of twelve servers", f"{separate / 1e6:.0f} MB"),
        ("steps of several workflows", f"{result['mixed_steps']} of {result['all_steps']}"),
        ("pictures other than alone", str(result["num_wrong"])),
    ]
    print_report(f"12 workflows, {args.rounds} requests of each at once, {args.steps} steps", rows, result, args.output)


def served(layout: Layout, args: argparse.Namespace) -> tuple[dict[str, Value], int]:
    """(figures of `measure`, bytes of all processes afterwards)"""
    flags = ["--dtype", "float32", "--threads", str(args.threads), "--no-playground", "--no-mask-aware", *layout.flags]
    with ready_server(flags) as server:
        return measure(server.url, layout, args.steps, args.rounds), pss_bytes(server.process.pid)


def measure(url: str, layout: Layout, steps: int, rounds: int) -> dict[str, Value]:
    """Send requests of all workflows one by one, and then all at once. resident_mb: of all components in memory."""
    calls = generations(Mix(num_inference_steps=str(steps)), rounds, np.random.default_rng(0))
    alone = Counter[str]()
    for name in layout.workflows:
        alone += asyncio.run(_pictures(url, layout, calls, name, 1))
    before, _ = _engine_facts(url)
    together = asyncio.run(_all_pictures(url, layout, calls))
    after, resident = _engine_facts(url)
    return {
        "benchmark": "twelve_workflows",
        "all_steps": after["steps"] - before["steps"],
        "mixed_steps": after["mixed_steps"] - before["mixed_steps"],
        "num_wrong": (alone - together).total(),
        "resident_mb": resident / 1e6,
    }


async def _all_pictures(url: str, layout: Layout, calls: Sequence[EditCall]) -> Counter[str]:
    """Digests of the pictures of these requests by all workflows, all at once."""
    each = await asyncio.gather(*(_pictures(url, layout, calls, name, len(calls)) for name in layout.workflows))
    return sum(each, Counter[str]())


async def _pictures(url: str, layout: Layout, calls: Sequence[EditCall], name: str, clients: int) -> Counter[str]:
    """Digests of the pictures of these requests by one workflow."""
    run = await warm_up(Target(url, name, extra=layout.workflows[name]), calls, clients)
    return Counter(outcome.digest for outcome in run.outcomes)


def _engine_facts(url: str) -> tuple[dict[str, int], int]:
    """(totals of the one engine, bytes of the components in its memory)"""
    (engine,) = httpx.get(f"{url}/v1/engine/stats").json()["engines"]
    return engine["totals"], sum(each["bytes"] for each in engine["resident_models"])


if __name__ == "__main__":
    main()
