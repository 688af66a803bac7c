"""Strength: the share of a schedule that leaves exactly its last steps."""

from __future__ import annotations

from core.sampling_params import SamplingParams


def exact_strength(steps: int, total: int) -> float:
    """Of a number in a workflow: a step that it covers in part is run."""
    share, schedule = steps / total, SamplingParams(num_inference_steps=total)
    return share if schedule.steps_at(share) == steps else (steps - 0.5) / total


def asked_strength(steps: int, total: int, *, is_flow: bool) -> float:
    """Of a request. is_flow: for a family that samples by flow matching; those of UNets leave out a step that it covers
    in part.
    """
    if is_flow:
        return exact_strength(steps, total)
    share = steps / total
    return share if int(total * share) == steps else (steps + 0.5) / total
