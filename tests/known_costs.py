"""A model whose costs are known exactly, and what its requests cost beside their batches; for simulated servers."""

from __future__ import annotations

from fakes import MODEL

from benchmarks.simulation.outside import Surroundings
from benchmarks.simulation.server_engine import Known
from core.graph.work import Work
from core.messages.worker import CostSample

SECONDS = {"text_encode": 0.1, "image_encode": 0.2, "denoise": 1.0, "decode": 0.4}
"""Of one item of each op on one rank, whatever its size."""

TWO_RANKS = 0.6
"""What a step takes on two ranks, as a share of this."""

AROUND = Surroundings(prepare=0.5, deliver=0.25, trip=0.0, pause=0.0, outside_cpu=0.125)


def known() -> Known:
    """Costs of one item each, learnt often enough to be exact."""
    sizes = [(tokens, number) for tokens in (24, 256, 280) for number in (1, 2, 4)] * 20
    lines = [(op, 1, seconds) for op, seconds in SECONDS.items()] + [("denoise", 2, TWO_RANKS * SECONDS["denoise"])]
    samples = [
        CostSample(MODEL.name, op, Work.of([tokens] * number), number * seconds, degree=degree)
        for op, degree, seconds in lines
        for tokens, number in sizes
    ]
    return Known(MODEL, (), tuple(samples))
