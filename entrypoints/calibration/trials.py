"""Measures settings of mask-aware execution: runs edits under each, and compares their pictures with exact ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from core.errors import ConfigError
from core.sampling_params import SamplingParams
from entrypoints.calibration.samples import Sample
from entrypoints.calibration.search import (
    CHEAPEST,
    CacheSearch,
    ClassTrial,
    Setting,
    Trial,
    by_size,
    schedules,
    search_steps,
)
from entrypoints.calibration.similarity import ssim_in_box
from entrypoints.image_engine import EditResult, ImageEngine

Pixels = npt.NDArray[np.uint8]
StartEngine = Callable[[str, str], ImageEngine]
"""(--cache-keyframes, --cache-dtype) -> an engine with the checkpoint to calibrate."""

MIN_CLASS, MAX_CLASSES = 8, 4
"""Fewest edits in a mask class, since the tenth percentile of fewer says little, and the most classes."""


class Trials:
    """Runs trials on an engine that it owns; a context manager. The engine is restarted only if a setting needs other
    engine flags.

    start: makes engines. num_inference_steps: None for the model's own. say: receives a line of text for each trial.
    """

    def __init__(self, start: StartEngine, num_inference_steps: int | None, say: Callable[[str], None]) -> None:
        self._start = start
        self._steps = num_inference_steps
        self._say = say
        self._samples: Sequence[Sample] = ()
        self._exact: list[Pixels] = []
        self._classes: list[list[int]] = []  # indices of samples, smallest masks first
        self._known: dict[Setting, Trial] = {}
        self._engine: ImageEngine | None = None
        self._flags: tuple[str, str] | None = None  # of the running engine

    def __enter__(self) -> Trials:
        self.model = self._open(CHEAPEST).model
        if self.model.page_scheme is None:
            self._close()
            raise ConfigError(f"{self.model.name} has no mask-aware execution: there is nothing to calibrate")
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    @property
    def num_inference_steps(self) -> int:
        return self.model.default_num_inference_steps if self._steps is None else self._steps

    @property
    def num_steps(self) -> int:
        """Denoising steps that an edit runs, the unit of full steps. May differ from num_inference_steps."""
        return self.model.num_steps(SamplingParams(num_inference_steps=self.num_inference_steps))

    def search(self, samples: Sequence[Sample], target: float) -> Trial:
        """The result of the setting to use, with every step computed, see CacheSearch. Raises ConfigError if no sample
        runs mask-aware, and the error of an edit that fails.
        """
        self._samples = samples
        self._run_exact(CHEAPEST)
        if not self._measure(CHEAPEST).num_edits:
            raise ConfigError("no edit ran mask-aware: give masks that leave part of the picture, or larger images")
        return CacheSearch(self._measure, self.num_steps, target).run()

    def search_steps(self, found: Setting, num_inference_steps: int, target: float) -> Trial | None:
        """The result of the steps to compute of edits with this number of steps, see `search.search_steps`; None if all
        are needed, as of so few that no schedule leaves one out. found: by `search`, which must have been called.
        """
        are_others = num_inference_steps != self.num_inference_steps
        if are_others:
            self._steps = num_inference_steps
            self._known.clear()
        if not schedules(self.num_steps):
            return None
        if are_others:
            self._run_exact(found)
        trial = search_steps(self._measure, self.num_steps, target, found)
        return trial if trial.setting.computed is not None and trial.reaches(target) else None

    def keyframes(self, setting: Setting) -> tuple[float, ...]:
        """Noise levels of a setting's keyframes, 0..1, as the engine spaces them; () for pages at every step."""
        scheme = self._open(setting).model.page_scheme
        assert scheme is not None
        return scheme.keyframes

    def _run_exact(self, setting: Setting) -> None:
        """Make the pictures to compare with. setting: whose engine makes them."""
        exact = self._run(setting, [SamplingParams(mask_aware=False)] * len(self._samples))
        self._exact = [_pixels(result) for result in exact]
        self._classes = by_size([_ratio(result) for result in exact], MIN_CLASS, MAX_CLASSES)

    def _measure(self, setting: Setting) -> Trial:
        """Measure a setting; results are kept, so that each setting runs once."""
        if setting not in self._known:
            self._known[setting] = trial = self._try(setting)
            self._say(trial.describe(self.num_steps))
        return self._known[setting]

    def _try(self, setting: Setting) -> Trial:
        results = self._run(setting, self._params(setting))
        return Trial(setting, tuple(self._judge(indices, results) for indices in self._classes))

    def _params(self, setting: Setting) -> list[SamplingParams]:
        """Sampling parameters for each sample."""
        class_of = {index: number for number, indices in enumerate(self._classes) for index in indices}
        return [
            SamplingParams(
                mask_margin=setting.margin,
                full_steps=setting.full_steps_of(class_of[index]) if setting.computed is None else 0,
                computed_steps=setting.computed,
                own_page_steps=setting.own_page_steps_of(class_of[index]),
            )
            for index in range(len(self._samples))
        ]

    def _judge(self, indices: Sequence[int], results: Sequence[EditResult]) -> ClassTrial:
        alike = [index for index in indices if results[index].reports[0].exact_reason is None]
        return ClassTrial(
            ssim=tuple(
                ssim_in_box(self._exact[index], _pixels(results[index]), self._samples[index].mask) for index in alike
            ),
            ratios=tuple(_ratio(results[index]) for index in indices),
        )

    def _run(self, setting: Setting, params: Sequence[SamplingParams]) -> list[EditResult]:
        """Run each sample with its `params`, to which seed and steps are added. Raises the first edit's error."""
        seeded = [
            msgspec.structs.replace(sampling, seed=sample.seed, num_inference_steps=self._steps, step_schedule="full")
            for sampling, sample in zip(params, self._samples, strict=True)
        ]
        results = self._open(setting).generate([sample.as_edit() for sample in self._samples], seeded, use_tqdm=False)
        for result in results:
            if result.error is not None:
                raise result.error
        return results

    def _open(self, setting: Setting) -> ImageEngine:
        flags = "per-step" if setting.keyframes is None else str(setting.keyframes), setting.dtype
        if self._engine is None or flags != self._flags:
            self._close()
            self._engine, self._flags = self._start(*flags), flags
        return self._engine

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _pixels(result: EditResult) -> Pixels:
    return np.asarray(result.images[0].convert("RGB"))


def _ratio(result: EditResult) -> float:
    return result.reports[0].mask_ratio
