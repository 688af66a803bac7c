"""Measures skip levels: how close pictures that begin in the state of another prompt are to those with every step.

For each two prompts and each share of the steps, one picture begins in the state that the other prompt's has left, from
the same noise. Pairs with more similar prompts come closer, so a level's similarity is the least one from which on they
are close enough.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from core.errors import ConfigError
from core.sampling_params import SamplingParams
from core.skip_level import SkipLevel
from entrypoints.calibration.similarity import ssim
from entrypoints.image_engine import Edit, EditResult, ImageEngine

SHARES = (0.2, 0.4)
"""Of the steps; those of LegoDiffusion's measurement (section 7.4)."""

MIN_PAIRS = 8
"""Of four couples of prompts, as each makes two pairs with one similarity. All but a little must be close; of ten or
more pairs one may be far."""

STATE_BYTES = 256 * 1024**2
"""Room for the states of one measurement: of one prompt at a time."""

StartEngine = Callable[[Sequence[SkipLevel]], ImageEngine]
"""Skip levels -> an engine with the checkpoint to calibrate and STATE_BYTES for states."""


class Pair(NamedTuple):
    """A picture of one prompt that began in the state of another's."""

    similarity: float  # of the prompts, -1..1
    ssim: float  # of the picture to that with every step, -1..1


def measure_skip_levels(
    start: StartEngine, prompts: Sequence[str], num_steps: int | None, target: float, say: Callable[[str], None]
) -> tuple[SkipLevel, ...]:
    """The skip level of each share. num_steps: of each picture; None: the model's own. target: SSIM that nine of ten
    pairs must reach. say: receives a line of text for each. Raises ConfigError for fewer than two prompts, and for runs
    of which no step may be skipped, and the error of a picture that fails.
    """
    prompts = list(dict.fromkeys(prompts))
    if len(prompts) < 2:
        raise ConfigError("skip levels compare prompts: give two or more different ones (--prompts-file)")
    found, exact = list[SkipLevel](), dict[tuple[int, str], npt.NDArray[np.uint8]]()
    for share in SHARES:
        with start((any_similarity(share),)) as engine:
            pairs = [pair for seed in range(len(prompts)) for pair in _pairs(engine, prompts, seed, num_steps, exact)]
        found.append(level_of(share, pairs, target))
        say(f"{found[-1]}, of {len(pairs)} pairs")
    return tuple(found)


def level_of(share: float, pairs: Sequence[Pair], target: float) -> SkipLevel:
    """The level with the least similarity from which on nine of ten pairs reach the target; if there is none, that of
    equal prompts, whose states are the same.
    """
    for least in sorted({pair.similarity for pair in pairs}):
        above = [pair.ssim for pair in pairs if pair.similarity >= least]
        if len(above) >= MIN_PAIRS and (p10 := float(np.percentile(above, 10))) >= target:
            mean = statistics.fmean(above)
            return SkipLevel(
                share=share, similarity=least, ssim_mean=round(mean, 5), ssim_p10=round(p10, 5), num_pairs=len(above)
            )
    return SkipLevel(share=share, similarity=1.0, ssim_mean=1.0, ssim_p10=1.0, num_pairs=0)


def any_similarity(share: float) -> SkipLevel:
    """The level at which all prompts are similar enough."""
    return SkipLevel(share=share, similarity=-1.0, ssim_mean=0.0, ssim_p10=0.0, num_pairs=0)


def _pairs(
    engine: ImageEngine,
    prompts: Sequence[str],
    seed: int,
    num_steps: int | None,
    exact: dict[tuple[int, str], npt.NDArray[np.uint8]],
) -> Iterator[Pair]:
    """All other prompts' pictures from the state of the prompt with the seed's number. With a seed of its own it is the
    only source. exact: (seed, prompt) -> picture with every step; what lacks is added.
    """
    source, others = prompts[seed], [prompt for number, prompt in enumerate(prompts) if number != seed]
    _run(engine, [source], seed, num_steps, approximate_caching=True)
    lacking = [prompt for prompt in others if (seed, prompt) not in exact]
    for prompt, result in zip(lacking, _run(engine, lacking, seed, num_steps), strict=True):
        exact[seed, prompt] = _pixels(result)
    for prompt, result in zip(others, _run(engine, others, seed, num_steps, approximate_caching=True), strict=True):
        recalled = result.reports[0].recalled
        if recalled is None or recalled.similarity is None:
            raise ConfigError("pictures of so few steps skip none; give more (--steps)")
        yield Pair(recalled.similarity, ssim(exact[seed, prompt], _pixels(result)))


def _run(
    engine: ImageEngine, prompts: Sequence[str], seed: int, num_steps: int | None, *, approximate_caching: bool = False
) -> list[EditResult]:
    """Raises the first picture's error."""
    sampling = SamplingParams(
        seed=seed, num_inference_steps=num_steps, step_schedule="full", approximate_caching=approximate_caching
    )
    results = engine.generate([Edit(prompt=prompt) for prompt in prompts], sampling, use_tqdm=False)
    for result in results:
        if result.error is not None:
            raise result.error
    return results


def _pixels(result: EditResult) -> npt.NDArray[np.uint8]:
    return np.asarray(result.images[0].convert("RGB"))
