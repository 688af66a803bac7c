"""Throughput of two served models that share a denoiser, against one: the steps of both are the same batches.

Eight clients edit, all on one name or half of them on each; both ways take turns on one server. Every picture is
compared with that of the same edit alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.command import command
from benchmarks.load.client import Target, warm_up
from benchmarks.load.dataset import EditCall, Mix, synthetic
from benchmarks.load.server import ready_server
from benchmarks.report import print_report
from benchmarks.turns import in_turns, median_ratio, timed
from core.config import EMBEDDED_MODEL

CLIENTS = 8
ONE, TWO = ("plain", "plain"), ("plain", "twin")
"""The models of both halves of the clients."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, steps=8, rounds=5, edits=32)
    args = parser.parse_args(argv)
    mix = Mix(template_reuse="fixed:4", num_inference_steps=str(args.steps))
    calls = synthetic(mix, args.edits, np.random.default_rng(0))
    flags = [flag for name in TWO for flag in ("--model", f"{name}={args.model}")]
    wrong = 0
    with ready_server([*flags, "--dtype", args.dtype, "--threads", str(args.threads)]) as server:
        alone = asyncio.run(_pictures(server.url, "plain", calls, 1))

        def send(names: Sequence[str]) -> Callable[[], None]:
            def run() -> None:
                nonlocal wrong
                wrong += (asyncio.run(_of_both(server.url, names, calls)) - alone).total()

            return run

        seconds = in_turns({"one name": timed(send(ONE)), "two names": timed(send(TWO))}, args.rounds)
    ratio = median_ratio(seconds["one name"], seconds["two names"])
    rows = [(name, f"{args.edits / min(each):.2f} edits/s at best") for name, each in seconds.items()]
    rows += [("throughput of two names, by that of one", f"{ratio:.3f}"), ("pictures other than alone", str(wrong))]
    result = {"benchmark": "shared_denoiser", "steps": args.steps, "edits": args.edits, "x_one_name": ratio}
    print_report(f"{CLIENTS} clients, {args.dtype}, {args.steps} steps", rows, result | {"wrong": wrong}, args.output)


async def _of_both(url: str, names: Sequence[str], calls: Sequence[EditCall]) -> Counter[str]:
    """Digests of the pictures: every second one is of the second model."""
    halves = [_pictures(url, name, calls[number :: len(names)], CLIENTS // 2) for number, name in enumerate(names)]
    return sum(await asyncio.gather(*halves), Counter[str]())


async def _pictures(url: str, model: str, calls: Sequence[EditCall], clients: int) -> Counter[str]:
    """Digests of the pictures."""
    return Counter(outcome.digest for outcome in (await warm_up(Target(url, model), calls, clients)).outcomes)


if __name__ == "__main__":
    main()
