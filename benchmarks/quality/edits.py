"""Held-out edits, exact and mask-aware, of a model that was trained on drawn scenes, and how alike they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.config import EMBEDDED_MODEL, CacheConfig
from engine.similarity import ssim, ssim_in_box
from entrypoints import Edit, EditResult, ImageEngine, SamplingParams
from tools.train_embedded.cases import Case
from tools.train_embedded.metrics import score
from tools.train_embedded.scenes import Pixels

OTHER_SEEDS = 1_000_000
"""Added to a case's seed, to see how much a picture may differ that is asked for in the same words."""

_CACHE = CacheConfig(host_bytes=1024**3)


@dataclass(frozen=True)
class Setting:
    """How mask-aware edits run; the defaults are those that are shipped. margin: px."""

    keyframes: str = "auto"
    dtype: str = "auto"
    margin: int | None = None
    full_steps: int | None = None

    @property
    def server(self) -> tuple[str, str]:
        """What a running engine cannot change."""
        return self.keyframes, self.dtype


@dataclass(frozen=True)
class Machine:
    """What exact and mask-aware edits share: compute dtype and threads of the worker (0 = its own choice), the prompt
    that templates are primed with, and the checkpoint.
    """

    dtype: str
    threads: int
    priming_prompt: str = ""
    model: str = EMBEDDED_MODEL

    def engine(self, setting: Setting) -> ImageEngine:
        return ImageEngine(
            self.model,
            dtype=self.dtype,
            threads=self.threads,
            cache_keyframes=setting.keyframes,
            cache_dtype=setting.dtype,
            priming_prompt=self.priming_prompt,
            cache=_CACHE,
        )


def run_exact(engine: ImageEngine, asked: Sequence[Case], steps: int, first_seed: int = 0) -> list[Pixels]:
    """Pictures of the exact mode; case i has seed first_seed + i."""
    params = [
        SamplingParams(seed=first_seed + i, num_inference_steps=steps, mask_aware=False) for i in range(len(asked))
    ]
    return [pixels(result) for result in _generate(engine, asked, params)]


def run_aware(engine: ImageEngine, asked: Sequence[Case], steps: int, setting: Setting) -> list[EditResult]:
    """Mask-aware results, with the seeds of `run_exact`."""
    return _generate(engine, asked, [aware_params(setting, i, steps) for i in range(len(asked))])


def aware_params(setting: Setting, seed: int, steps: int) -> SamplingParams:
    return SamplingParams(
        seed=seed, num_inference_steps=steps, mask_margin=setting.margin, full_steps=setting.full_steps
    )


def make_edit(case: Case) -> Edit:
    return Edit(prompt=case.prompt, image=case.template, mask_image=case.mask.astype(np.uint8) * 255)


def pixels(result: EditResult) -> Pixels:
    return np.asarray(result.images[0])


def _generate(engine: ImageEngine, asked: Sequence[Case], params: Sequence[SamplingParams]) -> list[EditResult]:
    results = engine.generate([make_edit(case) for case in asked], params, use_tqdm=False)
    for result in results:
        if result.error is not None:
            raise result.error
    return results


@dataclass(frozen=True)
class Likeness:
    """How alike two lists of pictures of the same cases are. in_box, whole: SSIM per case. colour, pattern: accuracy of
    the second list less that of the first, in points (hundredths).
    """

    in_box: npt.NDArray[np.float64]
    whole: npt.NDArray[np.float64]
    colour: float
    pattern: float

    @classmethod
    def of(cls, asked: Sequence[Case], exact: Sequence[Pixels], others: Sequence[Pixels]) -> Likeness:
        pairs = list(zip(exact, others, strict=True))
        before, after = score(exact, asked), score(others, asked)
        return cls(
            in_box=np.array([ssim_in_box(a, b, case.mask) for (a, b), case in zip(pairs, asked, strict=True)]),
            whole=np.array([ssim(a, b) for a, b in pairs]),
            colour=100 * (after.colour - before.colour),
            pattern=100 * (after.pattern - before.pattern),
        )

    @property
    def mean(self) -> float:
        return float(self.in_box.mean())

    @property
    def p10(self) -> float:
        """The SSIM that nine of ten pictures exceed."""
        return float(np.percentile(self.in_box, 10))

    @property
    def deciles(self) -> list[float]:
        """Least, 10 %, ... 90 %, greatest."""
        return [float(value) for value in np.percentile(self.in_box, range(0, 101, 10))]


def num_changed_outside(asked: Sequence[Case], edits: Sequence[Pixels]) -> int:
    """Pictures that differ from their upload anywhere outside the mask."""
    return sum(
        not np.array_equal(edit[~case.mask], case.template[~case.mask]) for case, edit in zip(asked, edits, strict=True)
    )
