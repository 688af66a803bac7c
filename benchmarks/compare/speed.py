"""Speeds of two trees, measured in turns on two running servers; the ratio counts."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks.compare.trees import Tree
from benchmarks.load.client import Target, warm_up
from benchmarks.load.dataset import Mix, synthetic
from benchmarks.load.server import Server, start_server
from benchmarks.turns import in_turns

CLIENTS = 8
TEMPLATES = "fixed:4"


@dataclass(frozen=True)
class Measure:
    """One figure, in seconds (lower is better). model: a directory, empty for the embedded model."""

    name: str
    model: str
    steps: int
    edits: int
    clients: int
    mask_aware: bool = True


def measures(tiny: str) -> list[Measure]:
    """tiny: a checkpoint whose step takes about a millisecond, which shows the engine's own time per step."""
    return [
        Measure("lone warm edit, 8 steps", "", 8, 4, 1),
        Measure("lone warm edit, 28 steps", "", 28, 3, 1),
        Measure("lone exact edit, 8 steps", "", 8, 3, 1, mask_aware=False),
        Measure("8 clients, 16 warm edits, 8 steps", "", 8, 16, CLIENTS),
        Measure("tiny model, lone edit, 200 steps", tiny, 200, 2, 1),
        Measure("tiny model, 8 clients, 100 steps", tiny, 100, 8, CLIENTS),
    ]


@dataclass(frozen=True)
class Speed:
    """seconds of both trees, round by round."""

    measure: Measure
    this: Sequence[float]
    ref: Sequence[float]

    @property
    def ratio(self) -> float:
        """This tree's time by the other's, the median over rounds; above 1: this tree is slower."""
        return statistics.median(this / ref for this, ref in zip(self.this, self.ref, strict=True))

    @property
    def spread(self) -> float:
        """Half the interquartile range of the ratio over rounds: a smaller change is noise. One round shows none."""
        ratios = [this / ref for this, ref in zip(self.this, self.ref, strict=True)]
        if len(ratios) == 1:
            return math.inf
        low, _, high = statistics.quantiles(ratios, n=4)
        return (high - low) / 2


def compare_speeds(this: Tree, ref: Tree, wanted: Sequence[Measure], rounds: int) -> list[Speed]:
    """All measures of a model with both its servers up, then those of the next model."""
    found = []
    for model in dict.fromkeys(measure.model for measure in wanted):
        with _servers((this, ref), model) as servers:
            for measure in (measure for measure in wanted if measure.model == model):
                ways = {number: _sender(server.url, measure) for number, server in enumerate(servers)}
                ours, theirs = in_turns(ways, rounds, warm_ups=2).values()
                found.append(Speed(measure, ours, theirs))
    return found


@contextmanager
def _servers(trees: Sequence[Tree], model: str) -> Iterator[list[Server]]:
    flags = ["--threads", "1", *(["--model", model] if model else [])]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(start_server(flags, root=tree.root, environment=tree.environment)) for tree in trees
        ]
        for server in servers:
            server.wait_for("/ready")
        yield servers


def _sender(url: str, measure: Measure) -> Callable[[], float]:
    """Sends the measure's edits once; seconds."""
    mix = Mix(template_reuse=TEMPLATES, num_inference_steps=str(measure.steps))
    calls = synthetic(mix, measure.edits, np.random.default_rng(0))
    target = Target(url, extra={"mask_aware": measure.mask_aware})
    return lambda: asyncio.run(warm_up(target, calls, measure.clients)).seconds
