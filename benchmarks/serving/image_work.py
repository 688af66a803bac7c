"""Who decodes and encodes the pictures? Edits of 1 to 12 megapixel photos under three ways of batching (FlashPS, 6.4).

Static: a batch is prepared, denoised until all are through, encoded; then the next. Continuous: requests join and leave
between steps, and so does their image work, in line. Disaggregated: Stencil, whose image processors are other
processes. The first two run in one process, with the number of torch threads that serves most.

Edits arrive at random (Poisson), at the same times for all, whatever the engine is doing; latency counts from then. The
load is a share of what the continuous engine can serve. The three take turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import psutil

from benchmarks.load.workload import available_cores
from benchmarks.report import Value, percentile, print_report
from benchmarks.serving.image_work_run import Arrival, Batching, EngineArgs, EngineProcess, Kind, Outcome, start_engine
from benchmarks.serving.image_work_uploads import FORMATS, MEGAPIXELS, write_uploads
from benchmarks.serving.pipeline_loop import DTYPES
from core.config import EMBEDDED_MODEL, ImageConfig
from model_executor.worker import default_threads

BATCHINGS: tuple[Batching, ...] = get_args(Batching)
NUM_UPLOADS = len(MEGAPIXELS) * len(FORMATS)


@dataclass
class Measured:
    """All rounds of one way of batching; seconds: how long they took. machine_cpu_seconds: of all processes."""

    outcomes: list[Outcome] = field(default_factory=list)
    cpu_seconds: float = 0.0
    machine_cpu_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def cores(self) -> float:
        """Cores in use, on average."""
        return self.cpu_seconds / self.seconds

    @property
    def foreign_cores(self) -> float:
        """Cores that others had of the machine, on average: a measurement is worth something near 0 only."""
        return (self.machine_cpu_seconds - self.cpu_seconds) / self.seconds

    def values(self, name: str) -> list[float]:
        """An attribute of every Outcome."""
        return [getattr(outcome, name) for outcome in self.outcomes]

    def mean(self, name: str) -> float:
        return statistics.fmean(self.values(name))

    def p95(self, name: str) -> float:
        return percentile(self.values(name), 0.95)


@dataclass(frozen=True)
class Inline:
    """The one-process engine at its best. capacity: edits a second, all of them due at once."""

    engine: EngineProcess
    threads: int
    capacity: float


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as engines:
        write_uploads(Path(folder))

        def start(kind: Kind, threads: int) -> EngineProcess:
            engine_args = EngineArgs(
                model=args.model,
                dtype=args.dtype,
                threads=threads,
                steps=args.steps,
                image_workers=args.image_workers,
                folder=folder,
            )
            return engines.enter_context(start_engine(kind, engine_args))

        inline = _best_inline(args, start)
        stencil = start("stencil", args.threads)
        measured = _measure(
            args, inline, {"static": inline.engine, "continuous": inline.engine, "disaggregated": stencil}
        )
    _report(args, inline, measured)


def _best_inline(args: argparse.Namespace, start: Callable[[Kind, int], EngineProcess]) -> Inline:
    candidates = []
    for threads in args.inline_threads:
        engine = start("inline", threads)
        outcomes, _ = engine.run("continuous", [Arrival(0.0, i % NUM_UPLOADS, i) for i in range(args.capacity_edits)])
        candidates.append(Inline(engine, threads, len(outcomes) / max(outcome.done for outcome in outcomes)))
    return max(candidates, key=lambda inline: inline.capacity)


def _measure(
    args: argparse.Namespace, inline: Inline, engines: Mapping[Batching, EngineProcess]
) -> dict[Batching, Measured]:
    measured = {batching: Measured() for batching in BATCHINGS}
    for number in range(args.rounds):
        arrivals = _arrivals(args.load * inline.capacity, args.seconds, seed=number)
        for batching in BATCHINGS:
            start, busy = time.monotonic(), _machine_cpu_seconds()
            outcomes, cpu_seconds = engines[batching].run(batching, arrivals)
            measured[batching].seconds += time.monotonic() - start
            measured[batching].machine_cpu_seconds += _machine_cpu_seconds() - busy
            measured[batching].cpu_seconds += cpu_seconds
            measured[batching].outcomes += outcomes
    return measured


def _machine_cpu_seconds() -> float:
    """Of all processes, since the machine started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """A Poisson process of `rate` edits a second."""
    rng, arrivals, due = random.Random(seed), list[Arrival](), 0.0
    while (due := due + rng.expovariate(rate)) < seconds:
        arrivals.append(Arrival(due, rng.randrange(NUM_UPLOADS), len(arrivals)))
    return arrivals


# --------------------------------------------------------------------------------------------------------- the report


def _report(args: argparse.Namespace, inline: Inline, measured: Mapping[Batching, Measured]) -> None:
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
    print_report(title, rows, result | {f"p95_below_{batching}": gain for batching, gain in gains.items()})


def _rows(measured: Mapping[Batching, Measured]) -> list[tuple[str, str]]:
    def row(name: str, cell: Callable[[Measured], str]) -> tuple[str, str]:
        return name, _columns([cell(measured[batching]) for batching in BATCHINGS])

    def seconds(name: str) -> Callable[[Measured], str]:
        return lambda one: f"{one.p95(name):.2f} / {one.mean(name):.2f}"

    return [
        row("request latency, P95 / mean (s)", seconds("latency")),
        row("until inference begins, P95 / mean (s)", seconds("wait")),
        row("inference, P95 / mean (s)", seconds("inference")),
        row("after inference, P95 / mean (s)", seconds("wait_for_file")),
        row(
            "interruptions, P95 / mean", lambda one: f"{one.p95('interruptions'):.0f} / {one.mean('interruptions'):.1f}"
        ),
        row("interrupted, P95 / mean (s)", seconds("interrupted_seconds")),
        row("cores in use", lambda one: f"{one.cores:.2f}"),
        row("cores in use by others", lambda one: f"{one.foreign_cores:.2f}"),
    ]


def _columns(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>16}" for cell in cells)


def _figures(one: Measured) -> dict[str, float]:
    return {
        "p95_s": one.p95("latency"),
        "mean_s": one.mean("latency"),
        "wait_mean_s": one.mean("wait"),
        "inference_p95_s": one.p95("inference"),
        "inference_mean_s": one.mean("inference"),
        "interruptions_p95": one.p95("interruptions"),
        "interruptions_mean": one.mean("interruptions"),
        "interrupted_mean_s": one.mean("interrupted_seconds"),
        "cores": one.cores,
        "foreign_cores": one.foreign_cores,
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="diffusers checkpoint")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="compute type")
    parser.add_argument("--steps", type=int, default=28, help="denoising steps of an edit")
    parser.add_argument("--threads", type=int, default=default_threads(1), help="torch threads of Stencil's worker")
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
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
