"""Pictures that begin in the state of an earlier picture with a similar prompt, against pictures of all steps: latency
and likeness, at each of the model's skip levels (LegoDiffusion, section 7.4: 20 % and 40 % of the steps).

The two prompts of a pair say the same in other words; none is among those that the levels were calibrated with. Of each
pair the first is made, which keeps its states, and then the second, alone, with all steps and from such a state, with
the same seed. Pairs that are not similar enough for a level are left out of its figures, and counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.command import command
from benchmarks.report import Row, print_report
from core.config import EMBEDDED_MODEL
from core.sampling_params import SamplingParams
from core.skip_level import SkipLevel
from engine.client.edit_types import EditReport
from entrypoints import Edit, ImageEngine
from entrypoints.calibration.similarity import ssim

PAIRS = (
    ("a navy dotted jacket", "navy dotted jacket"),
    ("a green checked shirt", "a person in a green checked shirt"),
    ("a yellow striped hoodie", "yellow striped hoodie"),
    ("a purple plain coat", "a purple plain coat in a room"),
    ("a pink pinstriped shirt", "pink pinstriped shirt"),
    ("a white dotted sweater", "a figure with a white dotted sweater"),
    ("a brown checked jacket", "brown checked jacket"),
    ("a grey plain hoodie", "a person in a grey plain hoodie"),
)
STATE_BYTES = 64 * 1024**2


class Made(NamedTuple):
    """A picture that was made alone."""

    seconds: float
    picture: npt.NDArray[np.uint8]
    report: EditReport


class Compared(NamedTuple):
    """The second prompt of a pair, with all steps and from a state."""

    full: Made
    recalled: Made

    @property
    def is_hit(self) -> bool:
        """Whether the prompts were similar enough."""
        return bool(self.recalled.report.recalled and self.recalled.report.recalled.steps_skipped)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, steps=20, rounds=2)
    args = parser.parse_args(argv)
    with _start(args, ()) as engine:
        levels = engine.model.skip_levels
    rows, result = list[Row](), {"benchmark": "approximate_caching", "steps": args.steps, "pairs": len(PAIRS)}
    for level in levels:
        figures = _figures(_measure(args, level))
        name = f"{level.share * 100:.0f}"
        result |= {f"{key}_{name}": value for key, value in figures.items()}
        likeness = f"SSIM {figures['ssim']:.4f}, least {figures['ssim_least']:.4f}"
        rows.append(
            (
                f"{name} % of the steps skipped, from a similarity of {level.similarity:g}",
                f"{figures['speed']:.2f}x ({figures['full_s']:.2f} s, {figures['recalled_s']:.2f} s), {likeness}, "
                f"{figures['hits']:.0f} of {len(PAIRS)} pairs",
            )
        )
    print_report(f"{args.steps} steps, {args.dtype}, {args.threads} threads", rows, result, args.output)


def _start(args: argparse.Namespace, levels: Sequence[SkipLevel] | None) -> ImageEngine:
    how = {"dtype": args.dtype, "threads": args.threads, "approximate_cache_bytes": STATE_BYTES}
    return ImageEngine(args.model, **how, skip_levels=levels or None)


def _measure(args: argparse.Namespace, level: SkipLevel) -> list[Compared]:
    """Each pair, `rounds` times with other seeds."""
    with _start(args, (level,)) as engine:
        _make(engine, PAIRS[0][0], args.steps, seed=0, approximate_caching=False)
        return [_compare(engine, *pair, args.steps, seed) for seed in range(1, args.rounds + 1) for pair in PAIRS]


def _compare(engine: ImageEngine, first: str, second: str, steps: int, seed: int) -> Compared:
    _make(engine, first, steps, seed, approximate_caching=True)
    full = _make(engine, second, steps, seed, approximate_caching=False)
    return Compared(full, _make(engine, second, steps, seed, approximate_caching=True))


def _make(engine: ImageEngine, prompt: str, steps: int, seed: int, *, approximate_caching: bool) -> Made:
    sampling = SamplingParams(
        seed=seed, num_inference_steps=steps, step_schedule="full", approximate_caching=approximate_caching
    )
    start = time.perf_counter()
    (result,) = engine.generate([Edit(prompt=prompt)], sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    if result.error is not None:
        raise result.error
    return Made(seconds, np.asarray(result.images[0].convert("RGB")), result.reports[0])


def _figures(compared: Sequence[Compared]) -> dict[str, float]:
    """Of the pairs that were similar enough, at least one: median seconds, and what the second prompt's picture is like
    to that with all steps."""
    hits = [each for each in compared if each.is_hit]
    full, recalled = (statistics.median(getattr(each, way).seconds for each in hits) for way in ("full", "recalled"))
    likeness = [ssim(each.full.picture, each.recalled.picture) for each in hits]
    return {
        "speed": statistics.median(each.full.seconds / each.recalled.seconds for each in hits),
        "full_s": full,
        "recalled_s": recalled,
        "ssim": statistics.fmean(likeness),
        "ssim_least": min(likeness),
        "hits": len(hits) / len(compared) * len(PAIRS),
    }


if __name__ == "__main__":
    main()
