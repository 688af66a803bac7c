"""Latency of a mix of large and small edits on several ranks, by how these share the steps.

FLUX-shaped blocks of random weights serve exact edits of 256, 512 and 1,024 px and small masks of templates, by a
Poisson process at a share of what ranks that each serve whole edits could do. The policy `elastic` chooses the number
of ranks of each step; beside it are engines of a fixed degree. All get the same edits at the same times, in turns, and
must answer with the same pictures. What one engine serves is also predicted, in simulated time from the model's profile
on this machine; what the policies of these systems are shown is written down for that.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.command import command, model_flags
from benchmarks.load.arrivals import due_times
from benchmarks.load.client import Run, Target, send_on_time, warm_up
from benchmarks.load.dataset import EditCall, Mix, TraceLine, from_trace
from benchmarks.load.server import ROOT, ready_server
from benchmarks.micro.large_checkpoint import write_checkpoint
from benchmarks.report import Value, percentile, print_report
from benchmarks.serving.mix_prediction import Alone, OneEngine, by_seed, predict
from benchmarks.serving.recorded import read
from benchmarks.serving.recorded_server import SETTLE_SECONDS, recorded_server
from benchmarks.simulation.server_engine import Known
from core.config import ModelConfig
from core.messages.engine import EngineRequest

SHAPE = {"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 4}
"""Hidden size 256."""
NATIVE_SIDE = 1024

LONE_EDITS = 4
"""Of each kind."""


class Kind(NamedTuple):
    """One kind of edit. share: of all edits. templates: pictures that its edits share; 0: every edit has its own."""

    share: float
    side: int  # px
    mask_ratio: float
    templates: int = 0


KINDS: Mapping[str, Kind] = {
    "256 px": Kind(0.4, 256, 1.0),
    "512 px": Kind(0.25, 512, 1.0),
    "1024 px": Kind(0.1, 1024, 1.0),
    "small masks of 512 px": Kind(0.25, 512, 0.08, templates=2),
}


class Recorded(NamedTuple):
    """A round on a system that can be predicted."""

    warm_ups: list[EngineRequest]
    requests: list[EngineRequest]
    kinds: Sequence[str]
    due: Sequence[float]


@dataclass
class Measured:
    """Seconds of every edit of all rounds, and of each kind's."""

    seconds: list[float] = field(default_factory=list)
    by_kind: dict[str, list[float]] = field(default_factory=dict)
    degrees: dict[int, int] = field(default_factory=dict)  # degree -> steps
    recorded: list[Recorded] = field(default_factory=list)  # by round
    predicted: list[float] = field(default_factory=list)  # seconds; none where a system is not predicted

    def add(self, kinds: Sequence[str], run: Run) -> None:
        for kind, outcome in zip(kinds, run.outcomes, strict=True):
            if outcome.is_failed:
                raise RuntimeError(f"an edit of {kind} failed: {outcome.error}")
            self.seconds.append(outcome.latency)
            self.by_kind.setdefault(kind, []).append(outcome.latency)
            for degree in outcome.facts["degrees"]:
                self.degrees[degree] = self.degrees.get(degree, 0) + 1

    @property
    def mean(self) -> float:
        return statistics.mean(self.seconds)

    @property
    def p99(self) -> float:
        return percentile(self.seconds, 0.99)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {statistics.mean(self.by_kind[kind]):.2f}" for kind in KINDS if kind in self.by_kind)
        total = sum(self.degrees.values())
        degrees = ", ".join(f"{degree}: {number / total:.0%}" for degree, number in sorted(self.degrees.items()))
        return f"mean {self.mean:6.2f} s, P99 {self.p99:6.2f} s; mean of {kinds}; steps by degree {degrees}"


class System(NamedTuple):
    """Workers, and how they share steps. one_engine: if there are not several, behind a router."""

    flags: list[str]
    one_engine: OneEngine | None


def systems(num_ranks: int) -> dict[str, System]:
    """By name. Of a fixed degree there are as many engines as ranks allow."""
    found = {"elastic": System(["--workers-per-engine", str(num_ranks)], OneEngine("elastic", num_ranks))}
    for degree in (1, 2, 4):
        if degree <= num_ranks:
            sizes = {"--data-parallel-size": num_ranks // degree, "--workers-per-engine": degree, "--degree": degree}
            one_engine = OneEngine("step_batching", degree, degree) if degree == num_ranks else None
            found[f"degree {degree}"] = System([str(word) for flag in sizes.items() for word in flag], one_engine)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, dtype="float32", threads=1, steps=8, rounds=2, seed=0, edits=100)
    parser.add_argument("--ranks", type=int, default=2, help="workers of every system")
    parser.add_argument("--load", type=float, default=0.8, help="share of what single ranks could do")
    parser.add_argument("--systems", nargs="+", help="only these, such as elastic or 'degree 1'")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        args.model = str(Path(folder) / "large")
        write_checkpoint(Path(args.model), NATIVE_SIDE, SHAPE)
        chosen = systems(args.ranks)
        chosen = {name: system for name, system in chosen.items() if not args.systems or name in args.systems}
        if any(system.one_engine for system in chosen.values()):
            _profile(args)
        alone = _measure_alone(args)
        lone = {name: statistics.median(each.run.latencies) for name, each in alone.by_kind.items()}
        rate = args.load * args.ranks / sum(kind.share * lone[name] for name, kind in KINDS.items())
        measured = _measure(args, chosen, rate)
        stretch = _predict(args, chosen, measured, alone)
    print_measured(measured, lone, stretch, rate, args)


def draw(number: int, seed: int) -> tuple[list[str], list[EditCall]]:
    """Edits of all kinds in a random order, with the names of their kinds."""
    random = np.random.default_rng(seed)
    names = random.choice(list(KINDS), size=number, p=[kind.share for kind in KINDS.values()]).tolist()
    templates = iter(range(1000 * (seed + 1), 1000 * (seed + 2)))
    lines = [_line(KINDS[name], random, templates) for name in names]
    return names, from_trace(Mix(), lines, random)


def _line(kind: Kind, random: np.random.Generator, templates: Iterator[int]) -> TraceLine:
    which = int(random.integers(kind.templates)) if kind.templates else next(templates)
    return TraceLine(template=which, mask_ratio=kind.mask_ratio, size=f"{kind.side}x{kind.side}")


def _with_steps(calls: Sequence[EditCall], steps: int) -> list[EditCall]:
    return [EditCall(call.prompt, steps, call.seed, call.image, call.mask, call.area) for call in calls]


def _profile(args: argparse.Namespace) -> None:
    """Measure steps by degree, from which `elastic` predicts."""
    degrees = [str(degree) for degree in (1, 2, 4) if degree <= args.ranks]
    flags = [*model_flags(args), "--max-num-seqs", "2", "--degrees", *degrees]
    subprocess.run([sys.executable, "-m", "model_executor.worker.profiler", *flags], cwd=ROOT, check=True)


def _measure_alone(args: argparse.Namespace) -> Alone:
    """Edits of each kind, one by one on one rank, pages loaded."""
    random, templates = np.random.default_rng(0), iter(range(100, 1000))
    with recorded_server(model_flags(args), "step_batching") as recorded:
        target = Target(recorded.server.url)
        asyncio.run(_prepare(target, args.steps))
        warm_ups = [arrival.request for arrival in read(recorded.path)[0]]
        by_kind = {}
        for name, kind in KINDS.items():
            calls = from_trace(Mix(), [_line(kind, random, templates) for _ in range(LONE_EDITS)], random)
            by_kind[name] = recorded.send_one_by_one(target, _with_steps(calls, args.steps))
    return Alone(by_kind, warm_ups)


def _measure(args: argparse.Namespace, chosen: Mapping[str, System], rate: float) -> dict[str, Measured]:
    measured = {name: Measured() for name in chosen}
    for number in range(args.rounds):
        kinds, calls = draw(args.edits, args.seed + number)
        calls = _with_steps(calls, args.steps)
        due = due_times("poisson", args.edits, rate, 1.0, np.random.default_rng([args.seed + number, 1]))
        digests = set[tuple[str, ...]]()
        for name, (flags, one_engine) in chosen.items():
            flags = [*model_flags(args), *flags]
            if one_engine is None:
                with ready_server(flags) as server:
                    run = _serve(Target(server.url), calls, due)
            else:
                with recorded_server(flags, one_engine.policy) as recorded:
                    run = _serve(Target(recorded.server.url), calls, due)
                    measured[name].recorded.append(Recorded(*by_seed(run, read(recorded.path)[0]), kinds, due))
            measured[name].add(kinds, run)
            digests.add(tuple(outcome.digest for outcome in run.outcomes))
        assert len(digests) == 1, "pictures depend on the degree"
    return measured


def _serve(target: Target, calls: Sequence[EditCall], due: Sequence[float]) -> Run:
    asyncio.run(_prepare(target, calls[0].steps))
    return asyncio.run(send_on_time(target, calls, due))


def _predict(
    args: argparse.Namespace, chosen: Mapping[str, System], measured: Mapping[str, Measured], alone: Alone
) -> dict[str, float]:
    """Adds to what was measured what is predicted of it; see `Alone.stretch`."""
    if not any(system.one_engine for system in chosen.values()):
        return {}
    known = Known.of_new_process(ModelConfig(model=args.model, dtype=args.dtype, threads=args.threads))
    stretch = alone.stretch(known)
    for name, (_, one_engine) in chosen.items():
        for each in measured[name].recorded if one_engine else ():
            measured[name].predicted += predict(known, alone, one_engine, *each, stretch)
    return stretch


async def _prepare(target: Target, steps: int) -> None:
    """Every kind once, and every template that edits share."""
    lines = [
        TraceLine(template=which, mask_ratio=kind.mask_ratio, size=f"{kind.side}x{kind.side}")
        for kind in KINDS.values()
        for which in range(max(1, kind.templates))
    ]
    await warm_up(target, _with_steps(from_trace(Mix(), lines * 2, np.random.default_rng(0)), steps), 1)
    await asyncio.sleep(SETTLE_SECONDS)


def print_measured(
    measured: Mapping[str, Measured],
    lone: Mapping[str, float],
    stretch: Mapping[str, float],
    rate: float,
    args: argparse.Namespace,
) -> None:
    rows = [(name, str(each)) for name, each in measured.items()]
    rows.append(("alone on one rank", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in lone.items())))
    result: dict[str, Value] = {"benchmark": "elastic_mix", "ranks": args.ranks, "rate_per_s": rate}
    for name, each in measured.items():
        key = name.replace(" ", "_")
        result |= {f"{key}_mean_s": each.mean, f"{key}_p99_s": each.p99}
        line, found = _compared(each)
        rows.append((f"prediction of {name}", line))
        result |= {f"{key}_{name}": value for name, value in found.items()}
    if stretch:
        rows.append(("batches alone by the profile", ", ".join(f"{op} {value:.2f}" for op, value in stretch.items())))
        result |= {f"stretch_{op}": value for op, value in stretch.items()}
    fixed = [each for name, each in measured.items() if name != "elastic"]
    if "elastic" in measured and fixed:
        own = measured["elastic"]
        mean, p99 = own.mean / min(each.mean for each in fixed), own.p99 / min(each.p99 for each in fixed)
        rows.append(("elastic by the best fixed degree", f"mean {mean:.3f}, P99 {p99:.3f} of it"))
        result |= {"mean_ratio": mean, "p99_ratio": p99}
    title = f"{args.edits} edits x {args.rounds} rounds, {rate:.2f} a second on {args.ranks} ranks, {args.steps} steps"
    print_report(title, rows, result, args.output)


def _compared(measured: Measured) -> tuple[str, dict[str, float]]:
    """What is predicted beside what was measured, to print and as results."""
    if not measured.predicted:
        return "none: several engines behind a router", {}
    mean, p99 = statistics.mean(measured.predicted), percentile(measured.predicted, 0.99)
    mean_off, p99_off = mean / measured.mean - 1, p99 / measured.p99 - 1
    line = (
        f"mean {mean:6.2f} s, measured {measured.mean:6.2f} s, off by {mean_off:+.1%}; "
        f"P99 {p99:6.2f} s, measured {measured.p99:6.2f} s, off by {p99_off:+.1%}"
    )
    return line, {"predicted_mean_s": mean, "predicted_p99_s": p99, "mean_off": mean_off, "p99_off": p99_off}


if __name__ == "__main__":
    main()
