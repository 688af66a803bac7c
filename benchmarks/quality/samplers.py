"""Step schedules under samplers other than Euler's: with memory of earlier steps, and with noise drawn at every step.

The embedded model by diffusers' FluxFillPipeline with its scheduler replaced. Edits that compute some of the noise
levels are compared with edits of all levels by the same sampler, with the same seed; so are edits of as many levels
evenly spaced, and of all levels with other draws in the steps.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SchedulerMixin,
    UniPCMultistepScheduler,
)
from PIL import Image
from tqdm import tqdm

from benchmarks.baselines.fill_pipeline import FillEdit, FillPipeline
from benchmarks.command import command
from benchmarks.quality.edits import OTHER_SEEDS
from benchmarks.quality.judge import MASKS, edits_of
from benchmarks.report import Row, print_report
from core.config import EMBEDDED_MODEL
from entrypoints.calibration.search import schedules
from entrypoints.calibration.similarity import ssim_in_box
from tools.train_embedded.cases import Case
from tools.train_embedded.scenes import Pixels

LENGTHS = (9, 11, 13)
"""Of the schedules."""

NEARLY_ONE = 1 - 1e-6
"""The first noise level of solvers that need the logarithm of what it leaves of the picture; UniPC's own choice."""


class _FromNoise(ABC):
    """What FluxFillPipeline asks of a scheduler beside its steps."""

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: Sequence[float] = (),
        mu: float | None = None,
    ) -> None:
        """sigmas: falling from 1, none of them 0. mu: not used, since the embedded model's levels are not shifted."""
        self._take(sigmas, device)

    @abstractmethod
    def _take(self, sigmas: Sequence[float], device: str | torch.device | None) -> None:
        """Step through these noise levels."""

    def scale_noise(self, sample: torch.Tensor, timestep: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The first latents of an edit of strength 1."""
        return noise


class FlowUniPC(_FromNoise, UniPCMultistepScheduler):  # type: ignore[misc]  # untyped
    """UniPC on a flow model's noise levels, given as a list."""

    def _take(self, sigmas: Sequence[float], device: str | torch.device | None) -> None:
        UniPCMultistepScheduler.set_timesteps(self, device=device, sigmas=np.array(sigmas))


class FlowDPMSolver(_FromNoise, DPMSolverMultistepScheduler):  # type: ignore[misc]  # untyped
    """DPM-Solver++ on given noise levels of a flow model; diffusers' own spaces them itself."""

    def _take(self, sigmas: Sequence[float], device: str | torch.device | None) -> None:
        DPMSolverMultistepScheduler.set_timesteps(self, len(sigmas), device)
        levels = torch.tensor(sigmas, dtype=torch.float32).clamp(max=NEARLY_ONE)
        self.sigmas = torch.cat([levels, torch.zeros(1)])
        self.timesteps = (levels * self.config.num_train_timesteps).to(device)


class DrawsByLevel(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]  # untyped
    """Euler with noise at every step, drawn by a generator for each noise level that the step ends at."""

    def step(self, model_output: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor, **kwargs: Any) -> Any:
        level = float(self.sigmas[self.index_for_timestep(timestep) + 1])
        draws = torch.Generator().manual_seed(torch.initial_seed() + round(1e6 * level))
        return super().step(model_output, timestep, sample, generator=draws, **kwargs)


@dataclass(frozen=True)
class Sampler:
    """draws: whether its steps draw noise. make: from the checkpoint's own scheduler."""

    name: str
    draws: bool
    make: Callable[[FlowMatchEulerDiscreteScheduler], SchedulerMixin]


def _dpm(algorithm: str) -> Callable[[FlowMatchEulerDiscreteScheduler], SchedulerMixin]:
    return lambda own: FlowDPMSolver(
        algorithm_type=algorithm, use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=own.shift
    )


SAMPLERS = (
    Sampler("Euler", False, lambda own: own),
    Sampler("DPM++ 2M", False, _dpm("dpmsolver++")),
    Sampler(
        "UniPC",
        False,
        lambda own: FlowUniPC(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=own.shift),
    ),
    Sampler("DPM++ 2M SDE", True, _dpm("sde-dpmsolver++")),
    Sampler(
        "Euler, stochastic",
        True,
        lambda own: FlowMatchEulerDiscreteScheduler.from_config(own.config, stochastic_sampling=True),
    ),
    Sampler(
        "Euler, stochastic, draws by noise level",
        True,
        lambda own: DrawsByLevel.from_config(own.config, stochastic_sampling=True),
    ),
)


class Edits:
    """The edits to compare, by a pipeline whose scheduler may be replaced."""

    def __init__(self, pipeline: FillPipeline, asked: Sequence[Case], steps: int) -> None:
        self._pipeline = pipeline
        self._own = pipeline.pipeline.scheduler
        self._asked = asked
        self._steps = steps

    def compare(self, sampler: Sampler, computed: Sequence[tuple[int, ...]]) -> dict[str, float]:
        """Mean SSIM against all steps: of the steps `computed`, of as many even ones, and of all with other draws."""
        self._pipeline.pipeline.scheduler = sampler.make(self._own)
        whole = self._run(self._steps)
        likeness: dict[str, float] = {}
        for each in computed:
            likeness[f"schedule of {len(each)}"] = self._ssim(whole, self._run(self._steps, each))
            likeness[f"{len(each)} even steps"] = self._ssim(whole, self._run(len(each)))
        if sampler.draws:
            likeness["other draws"] = self._ssim(whole, self._run(self._steps, draws=OTHER_SEEDS))
        return likeness

    def _run(self, steps: int, computed: tuple[int, ...] | None = None, draws: int = 0) -> list[Pixels]:
        """Case i has seed i for its first noise, and draws + i for the noise of its steps."""
        pictures = []
        for seed, case in enumerate(self._asked):
            torch.manual_seed(draws + seed)  # the pipeline gives the scheduler no generator
            template, mask = Image.fromarray(case.template), Image.fromarray(case.mask)
            (picture,) = self._pipeline([FillEdit(case.prompt, template, mask, steps, seed, computed)])
            pictures.append(np.where(case.mask[..., None], np.asarray(picture), case.template))
        return pictures

    def _ssim(self, whole: Sequence[Pixels], pictures: Sequence[Pixels]) -> float:
        pairs = zip(whole, pictures, self._asked, strict=True)
        return float(np.mean([ssim_in_box(a, b, case.mask) for a, b, case in pairs]))


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    asked = edits_of("test", args.masks, args.num_edits)
    edits = Edits(FillPipeline(args.model, args.dtype, args.threads), asked, args.steps)
    computed = [each for each in schedules(args.steps) if len(each) in LENGTHS]
    found = {sampler.name: edits.compare(sampler, computed) for sampler in tqdm(SAMPLERS, unit="sampler")}
    title = f"{args.num_edits} edits, masks: {args.masks}, SSIM in the box against all {args.steps} steps, mean"
    result = {"benchmark": "quality_samplers", "masks": args.masks, "steps": args.steps, "samplers": found}
    print_report(title, [_row(name, likeness) for name, likeness in found.items()], result, args.output)


def _row(name: str, likeness: Mapping[str, float]) -> Row:
    return name, "   ".join(f"{way} {ssim:.4f}" for way, ssim in likeness.items())


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, steps=28)
    parser.add_argument("--num-edits", type=int, default=12, help="edits, held out of training")
    parser.add_argument("--masks", choices=MASKS, default="box", help="a garment's outline, its box or part of that")
    return parser.parse_args(argv)
