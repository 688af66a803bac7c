"""Who decodes and encodes the pictures? Edits of 1 to 12 megapixel photos under three ways of batching (FlashPS, 6.4).

Static: a batch is prepared, denoised until all are through, encoded; then the next. Continuous: requests join and leave
between steps, and so does their image work, in line. Disaggregated: Stencil, whose image processors are other
processes. The first two are one process behind HTTP, with the number of torch threads that serves most.

Edits arrive at random (Poisson), at the same times for all, in an open loop. The load is a share of what the continuous
engine can serve. The three take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import psutil

from benchmarks.baselines.systems import INLINE
from benchmarks.command import command
from benchmarks.load.arrivals import due_times
from benchmarks.load.client import Outcome, Target, send_on_time, warm_up
from benchmarks.load.dataset import EditCall
from benchmarks.load.pictures import alpha_mask, encode, middle_box, photo
from benchmarks.load.process_tree import cpu_seconds
from benchmarks.load.server import STENCIL, Server, ready_server
from benchmarks.load.workload import available_cores, prompt
from benchmarks.report import Row, Value, percentile, print_report
from core.config import EMBEDDED_MODEL, ImageConfig
from model_executor.worker import default_threads

BATCHINGS = ("static", "continuous", "disaggregated")
MEGAPIXELS = (1, 3, 6, 12)
FORMATS = {"jpeg": {"quality": 90}, "png": {"compress_level": 1}}
MASK_SHARES = (0.05, 0.1, 0.2, 0.35)
"""Of the picture, in turn; means of the paper's workloads are 0.11, 0.19 and 0.35."""
BESIDE_INFERENCE = ("preprocess", "queue", "postprocess")
"""Parts of an edit that are not the model's; the others are text and image encoding, denoising and decoding."""


@dataclass
class Measured:
    """All rounds of one way of batching. seconds: how long they took. *_cpu_seconds: of the server, of all others."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    foreign_cpu_seconds: float = 0.0

    @property
    def cores(self) -> float:
        """Cores in use, on average."""
        return self.cpu_seconds / self.seconds

    @property
    def foreign_cores(self) -> float:
        """Cores that others used of the machine: a measurement is worth something near 0 only."""
        return self.foreign_cpu_seconds / self.seconds

    def values(self, name: str) -> list[float]:
        """A figure of `parts_of`, of every edit."""
        return [parts_of(outcome)[name] for outcome in self.outcomes]

    def mean(self, name: str) -> float:
        return statistics.fmean(self.values(name))

    def p95(self, name: str) -> float:
        return percentile(self.values(name), 0.95)


def parts_of(outcome: Outcome) -> dict[str, float]:
    """Seconds of an edit, from when it was due. wait: until inference begins, upload included. wait_for_file: from the
    model's pixels to the file. interruptions: how often inference stood still for the image work of others."""
    ms = outcome.facts["ms"]
    inference = sum(value for name, value in ms.items() if name not in BESIDE_INFERENCE) / 1e3
    return {
        "latency": outcome.latency,
        "wait": outcome.latency - inference - ms["postprocess"] / 1e3,
        "inference": inference,
        "wait_for_file": ms["postprocess"] / 1e3,
        "interruptions": outcome.facts.get("interruptions", 0),
        "interrupted": outcome.facts.get("interrupted_ms", 0.0) / 1e3,
    }


@dataclass(frozen=True)
class Inline:
    """The one-process engine at its best. capacity: edits a second, all of them due at once."""

    server: Server
    threads: int
    capacity: float


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", steps=28, rounds=2, threads=default_threads(1))
    parser.add_argument(
        "--inline-threads",
        type=int,
        nargs="+",
        default=sorted({1, available_cores()}),
        help="torch threads of the one-process engine; what serves most edits is taken",
    )
    parser.add_argument("--image-workers", type=int, default=ImageConfig().image_workers, help="image processors")
    parser.add_argument("--load", type=float, default=0.7, help="share of the continuous engine's capacity")
    parser.add_argument("--capacity-edits", type=int, default=16, help="edits that capacity is measured with")
    parser.add_argument("--seconds", type=float, default=33.0, help="how long edits arrive in a round")
    args = parser.parse_args(argv)
    uploads = make_uploads(args.steps)
    with ExitStack() as stack:

        def start(module: str, threads: int, *flags: str) -> Server:
            shared = ["--model", args.model, "--dtype", args.dtype, "--threads", str(threads)]
            server = stack.enter_context(ready_server([*shared, *flags], module))
            asyncio.run(warm_up(Target(server.url), uploads, len(uploads)))
            return server

        inline = max(
            (_capacity(args, start(INLINE, threads), threads, uploads) for threads in args.inline_threads),
            key=lambda one: one.capacity,
        )
        servers = {"continuous": inline.server, "static": start(INLINE, inline.threads, "--static")}
        servers["disaggregated"] = start(STENCIL, args.threads, "--image-workers", str(args.image_workers))
        measured = _measure(args, uploads, args.load * inline.capacity, servers)
    _report(args, inline, measured)


def make_uploads(steps: int) -> list[EditCall]:
    """An edit of a photo of every size and format."""
    calls = []
    for number, (megapixels, kind) in enumerate(product(MEGAPIXELS, FORMATS)):
        height = round((megapixels * 1e6 * 3 / 4) ** 0.5)
        size = height * 4 // 3, height
        # Shares that go round once more than sizes do, so that both formats of a size differ in theirs.
        share = MASK_SHARES[(number + number // len(MASK_SHARES)) % len(MASK_SHARES)]
        image = encode(photo(size, seed=number), kind, **FORMATS[kind])
        mask = encode(alpha_mask(middle_box(share, size), size))
        calls.append(EditCall(prompt(number), steps, number, image, mask, share))
    return calls


def _capacity(args: argparse.Namespace, server: Server, threads: int, uploads: Sequence[EditCall]) -> Inline:
    calls = _drawn(uploads, args.capacity_edits, np.random.default_rng(0))
    run = asyncio.run(send_on_time(Target(server.url), calls, [0.0] * len(calls)))
    return Inline(server, threads, len(calls) / run.seconds)


def _drawn(uploads: Sequence[EditCall], number: int, random: np.random.Generator) -> list[EditCall]:
    chosen = random.integers(len(uploads), size=number)
    return [replace(uploads[which], seed=seed, prompt=prompt(seed)) for seed, which in enumerate(chosen)]


def _measure(
    args: argparse.Namespace, uploads: Sequence[EditCall], rate: float, servers: Mapping[str, Server]
) -> dict[str, Measured]:
    measured = {batching: Measured() for batching in BATCHINGS}
    for number in range(args.rounds):
        random = np.random.default_rng(number)
        due = due_times("poisson", int(4 * rate * args.seconds) + 8, rate, 1.0, random)
        due = [when for when in due if when < args.seconds] or due[:1]
        calls = _drawn(uploads, len(due), random)
        for batching in BATCHINGS:
            _add_round(measured[batching], servers[batching], calls, due)
    return measured


def _add_round(measured: Measured, server: Server, calls: Sequence[EditCall], due: Sequence[float]) -> None:
    pid = server.process.pid
    own, machine, start = cpu_seconds(pid), _machine_cpu_seconds(), time.monotonic()
    run = asyncio.run(send_on_time(Target(server.url), calls, due))
    failed = [outcome.error for outcome in run.outcomes if outcome.is_failed]
    if failed:
        raise RuntimeError(f"{len(failed)} edits failed: {failed[0]}")
    own, machine = cpu_seconds(pid) - own, _machine_cpu_seconds() - machine
    measured.seconds += time.monotonic() - start
    measured.cpu_seconds += own
    measured.foreign_cpu_seconds += machine - own - run.cpu_seconds
    measured.outcomes += run.outcomes


def _machine_cpu_seconds() -> float:
    """Of all processes, since the machine started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _report(args: argparse.Namespace, inline: Inline, measured: Mapping[str, Measured]) -> None:
    rate, count = args.load * inline.capacity, len(measured["static"].outcomes)
    ours = measured["disaggregated"].p95("latency")
    gains = {batching: 1 - ours / measured[batching].p95("latency") for batching in ("static", "continuous")}
    rows = [("", _columns(BATCHINGS)), *_rows(measured)]
    rows += [(f"P95 of disaggregated below {batching}", f"{gain:.0%}") for batching, gain in gains.items()]
    rows.append(("continuous can serve", f"{inline.capacity:.2f} edits/s, best with {inline.threads} torch threads"))
    title = (
        f"{count} edits of 1 to 12 megapixels, {args.steps} steps, {args.dtype}: {rate:.2f} edits/s, {args.load:g} of "
        f"what continuous can serve; disaggregated: {args.threads} torch threads, {args.image_workers} image processors"
    )
    result: dict[str, Value] = {"benchmark": "image_work", "edits": count, "rate": rate, "capacity": inline.capacity}
    result |= {"inline_threads": inline.threads, "threads": args.threads, "image_workers": args.image_workers}
    for batching in BATCHINGS:
        result |= {f"{batching}_{name}": value for name, value in _figures(measured[batching]).items()}
    result |= {f"p95_below_{batching}": gain for batching, gain in gains.items()}
    print_report(title, rows, result, args.output)


def _rows(measured: Mapping[str, Measured]) -> list[Row]:
    def row(name: str, cell: Callable[[Measured], str]) -> Row:
        return name, _columns([cell(measured[batching]) for batching in BATCHINGS])

    def both(name: str) -> Callable[[Measured], str]:
        return lambda one: f"{one.p95(name):.2f} / {one.mean(name):.2f}"

    return [
        row("request latency, P95 / mean (s)", both("latency")),
        row("until inference begins, P95 / mean (s)", both("wait")),
        row("inference, P95 / mean (s)", both("inference")),
        row("after inference, P95 / mean (s)", both("wait_for_file")),
        row("interruptions, P95 / mean", both("interruptions")),
        row("interrupted, P95 / mean (s)", both("interrupted")),
        row("cores in use", lambda one: f"{one.cores:.2f}"),
        row("cores in use by others", lambda one: f"{one.foreign_cores:.2f}"),
    ]


def _columns(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>16}" for cell in cells)


def _figures(one: Measured) -> dict[str, float]:
    figures = {"p95_s": one.p95("latency"), "mean_s": one.mean("latency"), "wait_mean_s": one.mean("wait")}
    figures |= {"inference_p95_s": one.p95("inference"), "inference_mean_s": one.mean("inference")}
    figures |= {"interruptions_p95": one.p95("interruptions"), "interruptions_mean": one.mean("interruptions")}
    figures |= {"interrupted_mean_s": one.mean("interrupted"), "cores": one.cores}
    return figures | {"foreign_cores": one.foreign_cores}


if __name__ == "__main__":
    main()
