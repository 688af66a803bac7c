"""Latency of a mix of large and small edits on several ranks, by how these share the steps.

FLUX-shaped blocks of random weights serve exact edits of 256, 512 and 1,024 px and small masks of templates, by a
Poisson process at a share of what ranks that each serve whole edits could do. The policy `elastic` chooses the number
of ranks of each step; beside it are engines of a fixed degree. All get the same edits at the same times, in turns, and
must answer with the same pictures.
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

SHAPE = {"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 4}
"""Hidden size 256."""
NATIVE_SIDE = 1024


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


@dataclass
class Measured:
    """Seconds of every edit of all rounds, and of each kind's."""

    seconds: list[float] = field(default_factory=list)
    by_kind: dict[str, list[float]] = field(default_factory=dict)
    degrees: dict[int, int] = field(default_factory=dict)  # degree -> steps

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


def systems(num_ranks: int) -> dict[str, list[str]]:
    """Flags by system. Of a fixed degree there are as many engines as ranks allow."""
    found = {"elastic": ["--workers-per-engine", str(num_ranks), "--scheduling-policy", "elastic"]}
    for degree in (1, 2, 4):
        if degree <= num_ranks:
            sizes = {"--data-parallel-size": num_ranks // degree, "--workers-per-engine": degree, "--degree": degree}
            found[f"degree {degree}"] = [str(word) for flag in sizes.items() for word in flag]
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
        chosen = {name: flags for name, flags in chosen.items() if not args.systems or name in args.systems}
        if "elastic" in chosen:
            _profile(args)
        lone = _lone_seconds(args)
        rate = args.load * args.ranks / sum(kind.share * lone[name] for name, kind in KINDS.items())
        measured = _measure(args, chosen, rate)
    print_measured(measured, lone, rate, args)


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


def _lone_seconds(args: argparse.Namespace) -> dict[str, float]:
    """What an edit of each kind takes alone on one rank, pages loaded."""
    with ready_server(model_flags(args)) as server:
        return {name: _lone(Target(server.url), kind, args.steps) for name, kind in KINDS.items()}


def _lone(target: Target, kind: Kind, steps: int) -> float:
    random = np.random.default_rng(0)
    line = TraceLine(template=0, mask_ratio=kind.mask_ratio, size=f"{kind.side}x{kind.side}")
    calls = _with_steps(from_trace(Mix(), [line] * 4, random), steps)
    return statistics.median(asyncio.run(warm_up(target, calls, 1)).latencies[1:])


def _measure(args: argparse.Namespace, chosen: Mapping[str, Sequence[str]], rate: float) -> dict[str, Measured]:
    measured = {name: Measured() for name in chosen}
    for number in range(args.rounds):
        kinds, calls = draw(args.edits, args.seed + number)
        calls = _with_steps(calls, args.steps)
        due = due_times("poisson", args.edits, rate, 1.0, np.random.default_rng([args.seed + number, 1]))
        digests = set[tuple[str, ...]]()
        for name, flags in chosen.items():
            with ready_server([*model_flags(args), *flags]) as server:
                target = Target(server.url)
                asyncio.run(_prepare(target, args.steps))
                run = asyncio.run(send_on_time(target, calls, due))
            measured[name].add(kinds, run)
            digests.add(tuple(outcome.digest for outcome in run.outcomes))
        assert len(digests) == 1, "pictures depend on the degree"
    return measured


async def _prepare(target: Target, steps: int) -> None:
    """Every kind once, and every template that edits share."""
    lines = [
        TraceLine(template=which, mask_ratio=kind.mask_ratio, size=f"{kind.side}x{kind.side}")
        for kind in KINDS.values()
        for which in range(max(1, kind.templates))
    ]
    await warm_up(target, _with_steps(from_trace(Mix(), lines * 2, np.random.default_rng(0)), steps), 1)


def print_measured(
    measured: Mapping[str, Measured], lone: Mapping[str, float], rate: float, args: argparse.Namespace
) -> None:
    rows = [(name, str(each)) for name, each in measured.items()]
    rows.append(("alone on one rank", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in lone.items())))
    result: dict[str, Value] = {"benchmark": "elastic_mix", "ranks": args.ranks, "rate_per_s": rate}
    for name, each in measured.items():
        key = name.replace(" ", "_")
        result |= {f"{key}_mean_s": each.mean, f"{key}_p99_s": each.p99}
    fixed = [each for name, each in measured.items() if name != "elastic"]
    if "elastic" in measured and fixed:
        own = measured["elastic"]
        mean, p99 = own.mean / min(each.mean for each in fixed), own.p99 / min(each.p99 for each in fixed)
        rows.append(("elastic by the best fixed degree", f"mean {mean:.3f}, P99 {p99:.3f} of it"))
        result |= {"mean_ratio": mean, "p99_ratio": p99}
    title = f"{args.edits} edits x {args.rounds} rounds, {rate:.2f} a second on {args.ranks} ranks, {args.steps} steps"
    print_report(title, rows, result, args.output)


if __name__ == "__main__":
    main()
