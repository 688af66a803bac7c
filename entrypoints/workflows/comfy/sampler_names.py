"""SamplerNames: ComfyUI's names of samplers and schedules, and the schedulers of diffusers that do the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAMPLERS: Mapping[str, tuple[str, ...]] = {
    "euler": ("EulerDiscreteScheduler", "DDIMScheduler", "FlowMatchEulerDiscreteScheduler"),
    "ddim": ("DDIMScheduler", "EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler"),
    "euler_ancestral": ("EulerAncestralDiscreteScheduler",),
    "dpmpp_2m": ("DPMSolverMultistepScheduler",),
    "heun": ("FlowMatchHeunDiscreteScheduler",),
    "lcm": ("FlowMatchLCMScheduler",),
}
"""Name -> classes of scheduler_config.json. DDIM without noise of its own is Euler's method."""

EVEN = ("normal", "simple", "sgm_uniform", "ddim_uniform")
"""Schedules that are even in training time. They differ in where the first and last steps are; served models have the
steps of their scheduler_config.json."""

CURVED: Mapping[str, str] = {
    "karras": "use_karras_sigmas",
    "exponential": "use_exponential_sigmas",
    "beta": "use_beta_sigmas",
}
"""Schedule -> the setting of scheduler_config.json that asks for it."""


TIMESTEPS = 1000
"""Of the training of UNets."""


def levels_of(schedule: str) -> str:
    """Which noise levels a schedule has: the name of a curve, or "" for even ones."""
    return "" if schedule in EVEN else schedule


def passed(schedule: str, step: int, total: int, *, is_flow: bool) -> float:
    """The share of training time that has passed before a step of so many, of a schedule that is even in it. is_flow:
    for a family that samples by flow matching. Of UNets, percents are of the timesteps from 999 down to 0, of which
    `simple` has every 1000 / total-th, so that slightly more has passed than of an even share: step 2 of 4 is at 499,
    and 50 percent at 499.5 (ComfyUI's `simple_scheduler` and `percent_to_sigma`).
    """
    if schedule == "simple" and not is_flow:
        return int(step * TIMESTEPS / total) / (TIMESTEPS - 1)
    return step / (max(total - 1, 1) if schedule == "normal" else total)


def why_not(config: Mapping[str, Any], sampler: str, schedule: str) -> str:
    """Why the scheduler of a checkpoint is none for these names; "": it is one. config: its scheduler_config.json."""
    name = str(config.get("_class_name", ""))
    if name not in SAMPLERS[sampler]:
        return f"sampler {sampler} is {' or '.join(SAMPLERS[sampler])}, and its scheduler is {name}"
    asked = CURVED.get(schedule, "")
    curved = next((each for each in CURVED.values() if config.get(each)), "")
    if curved != asked:
        return (
            f"schedule {schedule} needs {asked or 'even noise levels'}, and its scheduler has {curved or 'even ones'}"
        )
    if _cuts(config):
        return f"sampler {sampler} leaves what a step predicts as it is, and its scheduler cuts off large values"
    if name == "DPMSolverMultistepScheduler" and not _is_second_order(config):
        return f"sampler {sampler} is DPM-Solver++ of second order without noise, and its scheduler is set otherwise"
    return ""


def _cuts(config: Mapping[str, Any]) -> bool:
    """Whether predicted pictures are kept within limits, as DDIMScheduler does unless it is told not to."""
    is_ddim = config.get("_class_name") == "DDIMScheduler"
    return bool(config.get("clip_sample", is_ddim) or config.get("thresholding"))


def _is_second_order(config: Mapping[str, Any]) -> bool:
    return (config.get("algorithm_type", "dpmsolver++"), config.get("solver_order", 2)) == ("dpmsolver++", 2)
