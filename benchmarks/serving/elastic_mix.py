"""Latency of a mix of large and small edits on several ranks, by how these share the steps.

FLUX-shaped blocks of random weights serve exact edits of 256, 512 and 1,024 px and small masks of templates, by a
Poisson process at a share of what ranks that each serve whole edits could do. The policy `default` chooses the number
of ranks of each step, and so does the policy `elastic` that was before it; beside them are engines of a fixed degree.
All get the same edits at the same times, in turns, and must answer with the same pictures. Beside each is what is
predicted of the same edits in simulated time, from the model's profile on this machine; what the policies of all
systems are shown is written down for that.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.command import command, model_flags
from benchmarks.load.arrivals import due_times
from benchmarks.load.client import Run, Target, send_on_time, warm_up
from benchmarks.load.dataset import EditCall, Mix, TraceLine, from_trace
from benchmarks.load.server import ROOT
from benchmarks.load.workload import available_cores
from benchmarks.micro.large_checkpoint import write_checkpoint
from benchmarks.report import Row, Value, percentile, print_report
from benchmarks.serving.lone_run import LoneRun
from benchmarks.serving.mix_prediction import Alone, Round, System, predict
from benchmarks.serving.recorded import FORMER_ELASTIC, Batch, read
from benchmarks.serving.recorded_server import SETTLE_SECONDS, recorded_server
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.server_engine import Known, OpAtDegree
from core.config import ModelConfig

SHAPE = {"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 4}
"""Hidden size 256."""
NATIVE_SIDE = 1024

DEGREES = (1, 2, 4)

FORMER = "former elastic"

LONE_EDITS = 4
"""Of each kind and degree."""


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
class Served:
    """Seconds of the edits of all rounds, by kind; their denoising steps, by degree. worker_seconds: of all ranks."""

    by_kind: dict[str, list[float]] = field(default_factory=dict)
    num_steps: Counter[int] = field(default_factory=Counter)
    worker_seconds: float = 0.0

    def add(
        self, kinds: Sequence[str], latencies: Sequence[float], num_steps: Mapping[int, int], worker_seconds: float
    ) -> None:
        for kind, seconds in zip(kinds, latencies, strict=True):
            self.by_kind.setdefault(kind, []).append(seconds)
        self.num_steps.update(num_steps)
        self.worker_seconds += worker_seconds

    @property
    def every(self) -> list[float]:
        return [seconds for of_kind in self.by_kind.values() for seconds in of_kind]

    @property
    def mean(self) -> float:
        return statistics.mean(self.every)

    @property
    def p99(self) -> float:
        return percentile(self.every, 0.99)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {statistics.mean(self.by_kind[kind]):.2f}" for kind in KINDS if kind in self.by_kind)
        total = self.num_steps.total()
        degrees = ", ".join(f"{degree}: {number / total:.0%}" for degree, number in sorted(self.num_steps.items()))
        return (
            f"mean {self.mean:6.2f} s, P99 {self.p99:6.2f} s; mean of {kinds}; steps by degree {degrees}; "
            f"{self.worker_seconds:.1f} s of worker time"
        )


@dataclass
class Comparison:
    """What was measured of one system, beside what is predicted."""

    measured: Served = field(default_factory=Served)
    predicted: Served = field(default_factory=Served)
    cache_seconds: float = 0.0  # worker time of the activation cache, which predictions leave out
    num_primed: int = 0  # edits whose pages were not there, as predictions assume
    rounds: list[Round] = field(default_factory=list)

    def add(self, kinds: Sequence[str], run: Run, batches: Sequence[Batch]) -> None:
        """batches: of this run."""
        for kind, outcome in zip(kinds, run.outcomes, strict=True):
            if outcome.is_failed:
                raise RuntimeError(f"an edit of {kind} failed: {outcome.error}")
        num_steps = Counter(degree for outcome in run.outcomes for degree in outcome.facts["degrees"])
        self.measured.add(kinds, run.latencies, num_steps, sum(batch.seconds for batch in batches))
        self.cache_seconds += sum(batch.seconds for batch in batches if not batch.requests)
        self.num_primed += sum(outcome.facts["primed"] for outcome in run.outcomes)

    def predict(self, known: Known, alone: Alone, system: System, stretch: Mapping[OpAtDegree, float]) -> None:
        for edits in self.rounds:
            self.predicted.add(edits.kinds, *predict(known, alone, system, edits, stretch))

    @property
    def mean_off(self) -> float:
        """Of what was measured from what was predicted, as a share of that."""
        return self.measured.mean / self.predicted.mean - 1

    @property
    def p99_off(self) -> float:
        return self.measured.p99 / self.predicted.p99 - 1

    def rows(self, name: str) -> Iterator[Row]:
        cache = f"{self.cache_seconds:.1f} s of it for the activation cache; {self.num_primed} edits waited for pages"
        yield name, f"{self.measured}, {cache}"
        yield "  predicted", str(self.predicted)
        yield "  measured is off by", f"mean {self.mean_off:+.1%}, P99 {self.p99_off:+.1%}"

    def result(self, name: str) -> dict[str, float]:
        """To be printed as JSON."""
        values = {
            "mean_s": self.measured.mean,
            "p99_s": self.measured.p99,
            "predicted_mean_s": self.predicted.mean,
            "predicted_p99_s": self.predicted.p99,
            "mean_off": self.mean_off,
            "p99_off": self.p99_off,
            "worker_s": self.measured.worker_seconds,
            "predicted_worker_s": self.predicted.worker_seconds,
            "cache_s": self.cache_seconds,
            "primed": self.num_primed,
        }
        return {f"{_key(name)}_{key}": value for key, value in values.items()}


def systems(num_ranks: int) -> dict[str, System]:
    """By name. Of a fixed degree there are as many engines as ranks allow."""
    fixed = {f"degree {degree}": System(OURS, num_ranks // degree, degree, degree) for degree in _degrees(num_ranks)}
    return {OURS: System(OURS, 1, num_ranks), FORMER: System(FORMER_ELASTIC, 1, num_ranks)} | fixed


def _degrees(num_ranks: int) -> list[int]:
    return [degree for degree in DEGREES if degree <= num_ranks]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, dtype="float32", threads=1, steps=8, rounds=2, seed=0, edits=100)
    parser.add_argument("--ranks", type=int, default=2, help="workers of every system")
    parser.add_argument("--load", type=float, default=0.8, help="share of what single ranks could do")
    parser.add_argument("--systems", nargs="+", help="only these, such as default or 'degree 1'")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        args.model = str(Path(folder) / "large")
        write_checkpoint(Path(args.model), NATIVE_SIDE, SHAPE)
        chosen = systems(args.ranks)
        chosen = {name: system for name, system in chosen.items() if not args.systems or name in args.systems}
        _profile(args)
        known = Known.of_new_process(ModelConfig(model=args.model, dtype=args.dtype, threads=args.threads))
        assert known.has_profile, "the profile that was made is not found"
        alone = {degree: _measure_alone(args, degree) for degree in _degrees(args.ranks)}
        stretch = dict[OpAtDegree, float]()
        for each in alone.values():
            stretch = each.stretch(known) | stretch  # of an op that ranks do not share: as with one rank
        mean = sum(kind.share * _seconds(alone[1].by_kind[name]) for name, kind in KINDS.items())
        rate = args.load * args.ranks / mean
        compared = _measure(args, chosen, rate)
    for name, comparison in compared.items():
        comparison.predict(known, alone[chosen[name].degree], chosen[name], stretch)
    print_compared(compared, alone, stretch, rate, args)


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
    """Measure steps by degree, from which policies predict."""
    degrees = map(str, _degrees(args.ranks))
    flags = [*model_flags(args), "--max-num-seqs", "2", "--degrees", *degrees]
    subprocess.run([sys.executable, "-m", "model_executor.worker.probes.profiler", *flags], cwd=ROOT, check=True)


def _measure_alone(args: argparse.Namespace, degree: int) -> Alone:
    """Edits of each kind, one by one on so many ranks, pages loaded."""
    random, templates = np.random.default_rng(0), iter(range(100, 1000))
    system = System(OURS, 1, degree, degree)
    with recorded_server([*model_flags(args), *system.flags], system.policy) as recorded:
        target = Target(recorded.server.url)
        asyncio.run(_prepare(target, args.steps))
        warm_ups = [arrival.request for arrival in read(recorded.path)[0]]
        by_kind = {}
        for name, kind in KINDS.items():
            calls = from_trace(Mix(), [_line(kind, random, templates) for _ in range(LONE_EDITS)], random)
            by_kind[name] = recorded.send_one_by_one(target, _with_steps(calls, args.steps))
    return Alone(degree, by_kind, warm_ups)


def _measure(args: argparse.Namespace, chosen: Mapping[str, System], rate: float) -> dict[str, Comparison]:
    compared = {name: Comparison() for name in chosen}
    for number in range(args.rounds):
        kinds, calls = draw(args.edits, args.seed + number)
        calls = _with_steps(calls, args.steps)
        due = due_times("poisson", args.edits, rate, 1.0, np.random.default_rng([args.seed + number, 1]))
        digests = set[tuple[str, ...]]()
        for name, system in chosen.items():
            with recorded_server([*model_flags(args), *system.flags], system.policy) as recorded:
                target = Target(recorded.server.url)
                asyncio.run(_prepare(target, args.steps))
                run = asyncio.run(send_on_time(target, calls, due))
                arrivals, batches = read(recorded.path)
            compared[name].add(kinds, run, [batch for batch in batches if batch.started >= run.started])
            compared[name].rounds.append(Round.of(run, arrivals, kinds, due))
            digests.add(tuple(outcome.digest for outcome in run.outcomes))
        assert len(digests) == 1, "pictures depend on the degree"
    return compared


async def _prepare(target: Target, steps: int) -> None:
    """Every kind once, and every template that edits share."""
    lines = [
        TraceLine(template=which, mask_ratio=kind.mask_ratio, size=f"{kind.side}x{kind.side}")
        for kind in KINDS.values()
        for which in range(max(1, kind.templates))
    ]
    await warm_up(target, _with_steps(from_trace(Mix(), lines * 2, np.random.default_rng(0)), steps), 1)
    await asyncio.sleep(SETTLE_SECONDS)


def print_compared(
    compared: Mapping[str, Comparison],
    alone: Mapping[int, Alone],
    stretch: Mapping[OpAtDegree, float],
    rate: float,
    args: argparse.Namespace,
) -> None:
    rows = [row for name, comparison in compared.items() for row in comparison.rows(name)]
    result: dict[str, Value] = {"benchmark": "elastic_mix", "ranks": args.ranks, "rate_per_s": rate}
    for name, comparison in compared.items():
        result |= comparison.result(name)
    for degree, each in alone.items():
        for kind, lone in each.by_kind.items():
            rows.append((f"alone at degree {degree}, {kind}", _told(lone)))
            values = {"latency": _seconds(lone)} | asdict(lone.surroundings)
            result |= {f"alone_{degree}_{_key(kind)}_{name}_s": value for name, value in values.items()}
    multiples = ", ".join(f"{op} at degree {degree} {value:.2f}" for (op, degree), value in stretch.items())
    rows.append(("batches alone, by the profile", multiples))
    result |= {f"stretch_{op}_{degree}": value for (op, degree), value in stretch.items()}
    if args.ranks > available_cores():
        rows.append(("predicted", "as if all ranks outside of a batch did nothing; but they share cores with it"))
    for name, mean, p99 in against_others(compared):
        rows.append((f"{OURS} by {name}", f"mean {mean:.3f}, P99 {p99:.3f} of it"))
        result |= {f"mean_by_{_key(name)}": mean, f"p99_by_{_key(name)}": p99}
    title = f"{args.edits} edits x {args.rounds} rounds, {rate:.2f} a second on {args.ranks} ranks, {args.steps} steps"
    print_report(title, rows, result, args.output)


def against_others(compared: Mapping[str, Comparison]) -> Iterator[tuple[str, float, float]]:
    """(what the policy `default` is measured against, its mean and its P99 as shares of the other's)."""
    fixed = [name for name in compared if name.startswith("degree")]
    for other, names in (("best fixed degree", fixed), (FORMER, [name for name in compared if name == FORMER])):
        if OURS in compared and names:
            own, others = compared[OURS].measured, [compared[name].measured for name in names]
            yield other, own.mean / min(each.mean for each in others), own.p99 / min(each.p99 for each in others)


def _seconds(lone: LoneRun) -> float:
    return statistics.median(lone.run.latencies)


def _told(lone: LoneRun) -> str:
    around = lone.surroundings
    return (
        f"{_seconds(lone):.2f} s, of these {around.prepare * 1e3:.0f} ms before and "
        f"{around.deliver * 1e3:.0f} ms after the engine; {around.outside_cpu * 1e3:.0f} ms of CPU beside the workers"
    )


def _key(name: str) -> str:
    return name.replace(" ", "_")


if __name__ == "__main__":
    main()
