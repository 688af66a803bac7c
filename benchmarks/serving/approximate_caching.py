"""Pictures that begin in the state of an earlier picture with a similar prompt, against pictures of all steps: latency
and likeness with 20 % and 40 % of the steps skipped (LegoDiffusion, section 7.4).

The two prompts of a pair say the same in other words. Of each pair the first is made, which keeps its states, and then
the second, alone, with all steps and from such a state, with the same seed. Every pair counts as similar enough: what a
model's own calibration says is printed beside.
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
from engine.client.edit_types import EditReport
from entrypoints import Edit, ImageEngine
from entrypoints.calibration.similarity import ssim
from entrypoints.calibration.skip_levels import SHARES, any_similarity

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
    def similarity(self) -> float:
        """How alike the prompts are, -1..1. Raises AssertionError if the second one has recalled nothing."""
        recalled = self.recalled.report.recalled
        assert recalled is not None
        assert recalled.similarity is not None
        return recalled.similarity


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, steps=20, rounds=2)
    args = parser.parse_args(argv)
    rows, result = list[Row](), {"benchmark": "approximate_caching", "steps": args.steps, "pairs": len(PAIRS)}
    for share in SHARES:
        figures, calibrated = _measure(args, share)
        name = f"{share * 100:.0f}"
        result |= {f"{key}_{name}": value for key, value in figures.items()}
        likeness = f"SSIM {figures['ssim']:.4f}, least {figures['ssim_least']:.4f}"
        times = f"{figures['speed']:.2f}x ({figures['full_s']:.2f} s, {figures['recalled_s']:.2f} s)"
        similar = f"similarity {figures['similarity_least']:.3f} and more (calibrated: {calibrated})"
        rows.append((f"{name} % of the steps skipped", f"{times}, {likeness}, {similar}"))
    print_report(f"{args.steps} steps, {args.dtype}, {args.threads} threads", rows, result, args.output)


def _measure(args: argparse.Namespace, share: float) -> tuple[dict[str, float], str]:
    """The figures of each pair, `rounds` times with other seeds; the similarity from which on the model's calibration
    allows the share."""
    how = {"dtype": args.dtype, "threads": args.threads, "approximate_cache_bytes": STATE_BYTES}
    with ImageEngine(args.model, **how, skip_levels=[any_similarity(share)]) as engine:
        calibrated = [f"{each.similarity:g}" for each in engine.model.skip_levels if each.share == share]
        _make(engine, PAIRS[0][0], args.steps, seed=0, approximate_caching=False)
        runs = [(pair, seed) for seed in range(1, args.rounds + 1) for pair in enumerate(PAIRS)]
        # Of each pair a seed of its own, so that its first prompt is the only source.
        compared = [_compare(engine, *pair, args.steps, seed * len(PAIRS) + number) for (number, pair), seed in runs]
    return _figures(compared), calibrated[0] if calibrated else "never"


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
    """Median seconds, and how the second prompt's picture is like that with all steps."""
    full, recalled = (
        statistics.median(getattr(each, way).seconds for each in compared) for way in ("full", "recalled")
    )
    likeness = [ssim(each.full.picture, each.recalled.picture) for each in compared]
    return {
        "speed": statistics.median(each.full.seconds / each.recalled.seconds for each in compared),
        "full_s": full,
        "recalled_s": recalled,
        "ssim": statistics.fmean(likeness),
        "ssim_least": min(likeness),
        "similarity_least": min(each.similarity for each in compared),
    }


if __name__ == "__main__":
    main()
