"""Held-out edits, exact and mask-aware, by a model trained on drawn scenes, and how alike they are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.command import command
from core.config import EMBEDDED_MODEL, CacheConfig
from core.step_schedule import StepScheduleName
from entrypoints import Edit, EditResult, ImageEngine, SamplingParams
from entrypoints.calibration.similarity import ssim, ssim_in_box
from tools.train_embedded.cases import Case
from tools.train_embedded.metrics import score
from tools.train_embedded.scenes import Pixels

OTHER_SEEDS = 1_000_000  # added to a case's seed, to see how much pictures of the same prompt differ

_CACHE = CacheConfig(host_bytes=1024**3)


@dataclass(frozen=True)
class Setting:
    """How mask-aware edits run; the defaults are the model's."""

    keyframes: str = "auto"
    dtype: str = "auto"
    margin: int | None = None  # px
    full_steps: int | None = None  # None: by the mask ratio
    step_schedule: StepScheduleName = "full"


@dataclass(frozen=True)
class Machine:
    """What exact and mask-aware edits share."""

    dtype: str
    threads: int  # of the worker; 0 = its own choice
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


def options(doc: str | None) -> argparse.ArgumentParser:
    """A command's parser with the options of `Machine`."""
    return command(doc, model=EMBEDDED_MODEL, dtype="float32", threads=0)


def run_edits(
    engine: ImageEngine, asked: Sequence[Case], steps: int, setting: Setting | None = None, first_seed: int = 0
) -> list[EditResult]:
    """Case i has seed first_seed + i. setting: of mask-aware edits; None: exact ones. Raises the first edit's error."""
    edits = [
        Edit(prompt=case.prompt, image=case.template, mask_image=case.mask.astype(np.uint8) * 255) for case in asked
    ]
    params = [_params(steps, setting, first_seed + i) for i in range(len(asked))]
    results = engine.generate(edits, params, use_tqdm=False)
    for result in results:
        if result.error is not None:
            raise result.error
    return results


def _params(steps: int, setting: Setting | None, seed: int) -> SamplingParams:
    params = SamplingParams(seed=seed, num_inference_steps=steps, mask_aware=setting is not None)
    if setting is None:
        return params
    return msgspec.structs.replace(
        params, mask_margin=setting.margin, full_steps=setting.full_steps, step_schedule=setting.step_schedule
    )


def pictures(results: Sequence[EditResult]) -> list[Pixels]:
    return [np.asarray(result.images[0]) for result in results]


@dataclass(frozen=True)
class Likeness:
    """How alike two lists of pictures of the same cases are."""

    in_box: npt.NDArray[np.float64]  # SSIM per case
    whole: npt.NDArray[np.float64]
    colour: float  # accuracy of the second list less that of the first, in points (hundredths)
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
    def figures(self) -> dict[str, float]:
        """p10: the SSIM that nine of ten pictures exceed."""
        return {
            "mean": float(self.in_box.mean()),
            "p10": float(np.percentile(self.in_box, 10)),
            "least": float(self.in_box.min()),
            "whole": float(self.whole.mean()),
            "colour": self.colour,
            "pattern": self.pattern,
        }


def num_changed_outside(asked: Sequence[Case], edits: Sequence[Pixels]) -> int:
    """Pictures that differ from their upload anywhere outside the mask."""
    return sum(
        not np.array_equal(edit[~case.mask], case.template[~case.mask]) for case, edit in zip(asked, edits, strict=True)
    )
