"""Machine: the times of a simulated worker. The reference step takes 6 ms and 0.1 s for each 4608 tokens in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.simulation.durations import Durations
from core.costs.cost_model import CostKey, CostModel
from core.graph.op import OPS
from core.graph.work import Work
from core.messages.worker import Batch, CostSample, PageCopy
from core.page_scheme import PageLayout, PageScheme
from core.scheduling.ops.denoise import Denoise
from core.scheduling.ops.prime import Prime

IMAGE_TOKENS, TEXT_TOKENS = 4096, 512

SCHEME = PageScheme(
    layout=PageLayout(num_blocks=57, num_heads=24, head_dim=128, dtype="int8"),
    keyframes=(1.0, 0.5, 0.0),
    latent_bytes=128,
    fingerprint="simulation",
    guidance_scale=30.0,
    mask_margin=16,
    full_steps=0,
)
"""Pages of FLUX.1: 1.5 GB a keyframe of 1024 x 1024 px."""


@dataclass(frozen=True)
class Machine(Durations):
    """Times in seconds. speed: 2.0 halves all times except copies. copy_bytes_per_second: host to device, and back."""

    step: float = 0.006
    token: float = 0.1 / 4608
    text_encode: float = 0.0
    image_encode: float = 0.0
    decode: float = 0.0
    copy_bytes_per_second: float = 25e9
    speed: float = 1.0

    def batch_seconds(self, batch: Batch, work: Work) -> float:
        first = batch.items[0].work
        if isinstance(first, Denoise):
            return self.step_seconds(sum(work.queries))
        if isinstance(first, Prime):
            share = (first.blocks[1] - first.blocks[0]) / SCHEME.layout.num_blocks
            return share * self.step_seconds(len(batch.items) * (IMAGE_TOKENS + TEXT_TOKENS))
        return self._alone(OPS[batch.op].cost_name) * len(batch.items)

    def step_seconds(self, tokens: int) -> float:
        return (self.step + self.token * tokens) / self.speed

    def copy_seconds(self, copy: PageCopy) -> float:
        return copy.nbytes / self.copy_bytes_per_second

    def samples(self, model: str) -> Iterator[CostSample]:
        """What a start-up calibration would measure."""
        every = IMAGE_TOKENS + TEXT_TOKENS
        for number in (1, 2, 4, 8):
            for active in (64, 256, 640, 1536, IMAGE_TOKENS):
                tokens = active + TEXT_TOKENS
                work = Work.of_pairs([(tokens, every)] * number)
                yield self._sample(model, "denoise", work, self.step_seconds(number * tokens))
        for blocks in (1, 8, 57):
            share = blocks / SCHEME.layout.num_blocks
            work = Work.of_pairs([(int(share * every), every)])
            yield self._sample(model, "prime", work, share * self.step_seconds(every))
        for op, tokens in (("text_encode", TEXT_TOKENS), ("image_encode", IMAGE_TOKENS), ("decode", IMAGE_TOKENS)):
            for number in (1, 2):
                yield self._sample(model, op, Work.of([tokens] * number), number * self._alone(op))

    def _alone(self, op: str) -> float:
        seconds: float = getattr(self, op)
        return seconds / self.speed

    def _sample(self, model: str, op: str, work: Work, seconds: float) -> CostSample:
        return CostSample(model, op, work, seconds)


class FrozenCosts(CostModel):
    """A cost model that stops learning when frozen: a machine that does not drift has nothing more to teach."""

    is_frozen = False

    def observe(self, key: CostKey, work: Work, seconds: float) -> None:
        if not self.is_frozen:
            super().observe(key, work, seconds)
