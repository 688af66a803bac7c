"""SamplerNames: ComfyUI's names of samplers and schedules, and the schedulers of diffusers that do the same."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
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


TIMESTEPS: Mapping[str, int] = {"": 1000, "sd3": 1000, "flux": 10000}
"""Family, "" for UNets -> noise levels of the training, as ComfyUI counts them."""

LOWEST: Mapping[str, float] = {"": 0.0, "sd3": 0.003 / 1.002, "flux": 1 / (1 + (10000 - 1) / exp(1.15))}
"""Family -> the training time that is left at its lowest noise level, 0..1: in flow matching, that of the first of
these TIMESTEPS, shifted by 3 and by e^1.15."""


def levels_of(schedule: str) -> str:
    """Which noise levels a schedule has: the name of a curve, or "" for even ones."""
    return "" if schedule in EVEN else schedule


def passed(schedule: str, step: int, total: int, family: str) -> float:
    """The share of training time that has passed before a step of so many, of a schedule that is even in it. family:
    see TIMESTEPS.

    `normal` goes from the highest noise level to the lowest, `sgm_uniform` leaves out the last of one step more,
    `simple` has every (1000 / total)-th timestep from the highest down, `ddim_uniform` from the lowest but one up. Of
    UNets, percents are of the timesteps from 999 down to 0, so that slightly more has passed than of an even share:
    step 2 of 4 is at 499, and 50 percent at 499.5 (ComfyUI's `normal_scheduler`, `simple_scheduler`, `ddim_scheduler`
    and `percent_to_sigma`).
    """
    number = TIMESTEPS[family]
    if schedule in ("simple", "ddim_uniform"):
        stride = max(number // total, 1)
        done = int(step * number / total) if schedule == "simple" else number - 2 - stride * (total - 1 - step)
        return done / (number if family else number - 1)
    even = step / (max(total - 1, 1) if schedule == "normal" else total)
    return even * (1 - LOWEST[family])


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
