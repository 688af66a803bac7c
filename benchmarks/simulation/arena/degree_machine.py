"""DegreeMachine: a Machine whose ranks may compute a step together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2

from benchmarks.simulation.machine import IMAGE_TOKENS, TEXT_TOKENS, Machine
from core.graph.work import Work
from core.messages.worker import Batch, CostSample
from core.scheduling.ops.denoise import Denoise

DEGREES = (1, 2, 4)

ROWS = (1, 2, 4, 8)
"""Batches that are profiled."""

LARGE = 4 * IMAGE_TOKENS
"""Image tokens of 2048 x 2048 px."""


@dataclass(frozen=True)
class DegreeMachine(Machine):
    """exchange: seconds that each doubling of the ranks adds to a step: small steps gain nothing by more ranks. Decodes
    and encodings of pictures take time in proportion to the tokens.
    """

    text_encode: float = 0.01
    image_encode: float = 0.03
    decode: float = 0.12
    exchange: float = 0.012

    def batch_seconds(self, batch: Batch, work: Work) -> float:
        first = batch.items[0].work
        if isinstance(first, Denoise):
            return self.seconds_at(len(batch.ranks), sum(work.queries))
        if batch.op in ("image_encode", "decode"):
            return self._alone(batch.op) * sum(work.queries) / IMAGE_TOKENS
        return Machine.batch_seconds(self, batch, work)

    def seconds_at(self, degree: int, tokens: int) -> float:
        """A step of so many tokens on so many ranks."""
        return (self.step + self.token * tokens / degree + self.exchange * log2(degree)) / self.speed

    def samples(self, model: str) -> Iterator[CostSample]:
        """The latency profile of steps by degree, size and batch, and what a calibration measures beside it."""
        for every, actives in ((IMAGE_TOKENS, (64, 256, 640, 1536, IMAGE_TOKENS)), (LARGE, (LARGE,))):
            for active in actives:
                pair = active + TEXT_TOKENS, every + TEXT_TOKENS
                for degree in DEGREES:
                    for rows in ROWS if degree == 1 else (1,):
                        yield self._step_sample(model, Work.of_pairs([pair] * rows), degree)
        for sample in Machine.samples(self, model):
            if sample.op in ("prime", "text_encode"):
                yield sample
        for op in ("image_encode", "decode"):
            for tokens in (IMAGE_TOKENS, LARGE):
                seconds = self._alone(op) * tokens / IMAGE_TOKENS
                yield CostSample(model, op, Work.of([tokens]), seconds)

    def _step_sample(self, model: str, work: Work, degree: int) -> CostSample:
        seconds = self.seconds_at(degree, sum(work.queries))
        return CostSample(model, "denoise", work, seconds, is_profile=True, degree=degree)
