"""How well the cost model predicts: random batches of exact, mask-aware and priming work, timed in this process.

The model is fitted twice: to the probe that a worker runs at its first start, and to training batches as well, as while
serving. Held-out batches judge both. Training and held-out batches take turns, so that a slow machine slows both.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.command import command
from benchmarks.report import Value, print_report
from benchmarks.turns import timed
from core.config import EMBEDDED_MODEL, ModelConfig
from core.costs.cost_model import CostKey, CostModel
from core.graph.op import OPS, Op
from core.graph.work import Work
from core.messages.worker import CostSample
from core.model_info import ModelInfo
from core.scheduling.ops.denoise import DENOISE
from core.scheduling.ops.prime import PRIME
from model_executor.checkpoint.libraries import quiet_libraries
from model_executor.models.base import Family
from model_executor.worker.loading.resident import ResidentModels, set_threads
from model_executor.worker.probes.cost_probe import BUDGET_SECONDS, Batches, Timed, probe

MAX_REQUESTS = 8
EXACT_SHARE, PRIME_SHARE = 0.25, 0.2  # of requests, and of batches


@dataclass(frozen=True)
class Timing:
    """A batch that was run."""

    op: Op
    work: Work
    seconds: float


@dataclass(frozen=True)
class Accuracy:
    """r_squared: of seconds, over all batches. median_error, p90_error: relative to the batch's own seconds."""

    r_squared: float
    median_error: float
    p90_error: float

    def __str__(self) -> str:
        return f"R^2 {self.r_squared:.4f}, error median {self.median_error:.1%}, p90 {self.p90_error:.1%}"

    @classmethod
    def of(cls, model: CostModel, timings: Sequence[Timing]) -> Accuracy:
        seconds = np.array([timing.seconds for timing in timings])
        predicted = np.array([model.predict(_key(timing.op), timing.work) for timing in timings])
        errors = np.abs(predicted - seconds)
        r_squared = 1.0 - (errors**2).sum() / ((seconds - seconds.mean()) ** 2).sum()
        relative = errors / seconds
        return cls(float(r_squared), float(np.median(relative)), float(np.percentile(relative, 90)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, seed=0)
    parser.add_argument("--num-batches", type=int, default=200, help="held-out batches, and as many training batches")
    args = parser.parse_args(argv)
    set_threads(args.threads)
    family, info = opened(args.model, args.dtype)
    start = time.perf_counter()
    samples, probe_seconds = probe(family, info, BUDGET_SECONDS), time.perf_counter() - start
    timings = _run(Batches(family, info), args.num_batches * 2, random.Random(args.seed))
    training, held_out = timings[::2], timings[1::2]
    probed, trained = _fitted(samples, []), _fitted(samples, training)
    accuracies = {
        "probe alone, all": Accuracy.of(probed, held_out),
        "after training batches, all": Accuracy.of(trained, held_out),
    }
    for op in (DENOISE, PRIME):
        of_op = [timing for timing in held_out if timing.op is op]
        accuracies[f"after training batches, {op.name}"] = Accuracy.of(trained, of_op)
    _report(args, accuracies, len(samples), probe_seconds)


def opened(model: str, dtype: str) -> tuple[Family, ModelInfo]:
    """A loaded and warm model."""
    quiet_libraries()
    models = ResidentModels.open((ModelConfig(model=model, dtype=dtype),))
    models.load_all()
    models.warm_up()
    (info,) = models.ready(0).models
    return models.families[info.name], info


@torch.inference_mode()
def _run(batches: Batches, number: int, dice: random.Random) -> list[Timing]:
    return [_time(_draw(batches, dice)) for _ in range(number)]


def _draw(batches: Batches, dice: random.Random) -> Timed:
    if dice.random() < PRIME_SHARE:
        return batches.prime(dice.randint(1, 3), dice.choice((0.3, 0.6, 1.0)))
    return batches.denoise([_draw_share(dice) for _ in range(dice.randint(1, MAX_REQUESTS))])


def _draw_share(dice: random.Random) -> float:
    return 1.0 if dice.random() < EXACT_SHARE else dice.uniform(0.01, 0.95)


def _time(batch_of: Timed) -> Timing:
    """The second of two calls: a request's later steps, which are most of them."""
    op, work, batch = batch_of
    batch()
    return Timing(op, work, timed(batch)())


def _fitted(samples: Sequence[CostSample], training: Sequence[Timing]) -> CostModel:
    model = CostModel()
    for sample in samples:
        model.observe(_key(OPS[sample.op]), sample.work, sample.seconds)
    for timing in training:
        model.observe(_key(timing.op), timing.work, timing.seconds)
    return model


def _key(op: Op) -> CostKey:
    return CostKey("model", (), op.cost_name, "cpu", 1)


def _report(args: argparse.Namespace, accuracies: dict[str, Accuracy], num_samples: int, probe_seconds: float) -> None:
    result: dict[str, Value] = {"benchmark": "cost_model", "dtype": args.dtype, "threads": args.threads}
    rows = []
    for name, accuracy in accuracies.items():
        rows.append((name, str(accuracy)))
        slug = name.replace(", ", "_").replace(" ", "_")
        result |= {f"{slug}_r_squared": accuracy.r_squared, f"{slug}_median_error": accuracy.median_error}
    rows.append(("probe", f"{num_samples} samples in {probe_seconds:.2f} s"))
    result["probe_s"] = probe_seconds
    title = f"{args.num_batches} held-out batches, {args.dtype}, {args.threads} threads"
    print_report(title, rows, result, args.output)


if __name__ == "__main__":
    main()
