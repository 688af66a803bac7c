"""Two engines as on other machines (ChildHost) against two of this machine: throughput, and a lone edit's latency.

Both servers run all the time and take turns. `shared`: the share of the processors' time that goes to what stands
between clients and engines (API server, hosts, image processors), which is more there: encryption, copies.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import get_args

import numpy as np

from benchmarks.command import command, model_flags
from benchmarks.load.client import Target, checked, send_in_turn
from benchmarks.load.dataset import EditCall, Mix, synthetic
from benchmarks.load.placed_server import MODULE, Place, environment
from benchmarks.load.process_tree import cpu_by_name
from benchmarks.load.server import Server, start_server
from benchmarks.report import Row, Value, print_report
from benchmarks.turns import in_turns, median_ratio
from core.config import EMBEDDED_MODEL

PLACES: tuple[Place, ...] = get_args(Place)
WORKING = ("stencil-worker", "stencil-engine")
"""What the names of processes begin with that do an engine's work."""

CONCURRENCY = 8
NUM_CALLS = 64
LONE_EDITS = 8
"""Of a turn."""


class Turns:
    """The turns of one server."""

    def __init__(self, server: Server, calls: Sequence[EditCall], large: Sequence[EditCall], seconds: float) -> None:
        """calls: of which 8 at a time are sent. large: that are sent alone."""
        self._server, self._target = server, Target(server.url)
        self._calls, self._large, self._seconds = calls, large, seconds
        self.shared: list[float] = []  # by turn

    def rate(self) -> float:
        """Edits per second."""
        before = cpu_by_name(self._server.process.pid)
        run = checked(asyncio.run(send_in_turn(self._target, self._calls, CONCURRENCY, seconds=self._seconds)))
        after = cpu_by_name(self._server.process.pid)
        spent = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
        working = sum(seconds for name, seconds in spent.items() if name.startswith(WORKING))
        self.shared.append(1.0 - working / sum(spent.values()))
        return len(run.outcomes) / run.seconds

    def lone(self) -> float:
        """Seconds of an edit alone, the median."""
        return statistics.median(checked(asyncio.run(send_in_turn(self._target, self._large, 1))).latencies)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, steps=8, rounds=5)
    parser.add_argument("--sizes", default="512x512", help="of the edits whose rate is measured")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a turn")
    args = parser.parse_args(argv)
    random = np.random.default_rng(0)
    calls = synthetic(Mix(num_inference_steps=str(args.steps), sizes=args.sizes), NUM_CALLS, random)
    large = synthetic(Mix(num_inference_steps="2", sizes="1024x1024"), LONE_EDITS, random)
    flags = [*model_flags(args), "--data-parallel-size", "2", "--no-mask-aware", "--log-level", "warning"]
    with ExitStack() as stack:
        turns = dict[Place, Turns]()
        for place in PLACES:
            server = stack.enter_context(start_server(flags, MODULE, environment=environment(place)))
            server.wait_for("/ready")
            turns[place] = Turns(server, calls, large, args.seconds)
        rates = in_turns({place: each.rate for place, each in turns.items()}, args.rounds)
        lone = in_turns({place: each.lone for place, each in turns.items()}, args.rounds)
    ratio = median_ratio(rates["remote"], rates["local"])
    added = statistics.median(there - here for here, there in zip(lone["local"], lone["remote"], strict=True))
    shared = {place: statistics.median(each.shared) for place, each in turns.items()}
    rows: list[Row] = [
        (place, f"{statistics.median(rates[place]):.2f} edits/s, shared {shared[place]:.1%}") for place in PLACES
    ]
    each = ", ".join(f"{there / here:.3f}" for here, there in zip(rates["local"], rates["remote"], strict=True))
    here = 1e3 * statistics.median(lone["local"])
    rows.append(("remote / local", f"{ratio:.3f} ({each}); shared: {shared['remote'] - shared['local']:.1%} more"))
    rows.append(("1024 x 1024 px alone", f"remote longer by {1e3 * added:.0f} ms of {here:.0f}"))
    result: dict[str, Value] = {"benchmark": "remote_engines", "rounds": args.rounds, "ratio": ratio}
    result |= {"added_ms": 1e3 * added} | {f"{place}_shared": shared[place] for place in PLACES}
    print_report(f"two engines, {args.sizes} px, {CONCURRENCY} edits at a time", rows, result, args.output)


if __name__ == "__main__":
    main()
