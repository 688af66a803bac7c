"""Passes: how each of the samplers in a row denoises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from core.sampling_params import MAX_INFERENCE_STEPS
from entrypoints.workflows.comfy.composition import Pass
from entrypoints.workflows.comfy.graph import Node
from entrypoints.workflows.comfy.sampler_names import levels_of

FULL = 0.9999
"""From this denoise on, a KSampler runs the whole schedule."""

SEED_MASK = 2**62 - 1
"""What is kept of a seed of 64 bits. Requests have none above MAX_SEED, 2**63 - 1, and with n pictures it must be n - 1
below that, also where a batch has one seed. A generator of the CPU reads the 32 lowest bits alone.
"""


def read_passes(samplers: Sequence[Node], *, is_empty: bool, refines: Sequence[bool]) -> tuple[Pass, ...]:
    """The passes of samplers in the order of execution. is_empty: the first one begins with nothing. refines: of each,
    whether another model than the first one's does it. Raises WorkflowError.
    """
    passes = list[Pass]()
    for node, is_refiner in zip(samplers, refines, strict=True):
        before = passes[-1] if passes else None
        each = replace(_pass_of(node, before), is_refiner=is_refiner)
        _check_levels(each, passes)
        if before is None and is_empty and not each.is_whole:
            raise node.error("it begins with an empty picture, so all steps are run", _share_input(node))
        passes.append(replace(each, starts_over=not each.goes_on and (before is not None or not is_empty)))
    if passes[-1].end < 1:
        raise passes[-1].node.error("no sampler goes on with the noise that it leaves", "return_with_leftover_noise")
    return tuple(passes)


def _share_input(node: Node) -> str:
    return "denoise" if node.kind == "KSampler" else "start_at_step"


def _check_levels(each: Pass, before: Sequence[Pass]) -> None:
    """Passes of one model have one scheduler."""
    first = next((other for other in before if other.is_refiner == each.is_refiner), each)
    if first.sampler != each.sampler:
        raise each.node.error(f"node {first.node.id} has another, and a model has one", "sampler_name")
    if levels_of(first.schedule) != levels_of(each.schedule):
        raise each.node.error(f"node {first.node.id} has another, and a model has one", "scheduler")


def _pass_of(node: Node, before: Pass | None) -> Pass:
    return _of_simple(node, before) if node.kind == "KSampler" else _of_advanced(node, before)


def _of_simple(node: Node, before: Pass | None) -> Pass:
    """denoise 0.5 of 14 steps are the last 14 of 28."""
    steps, denoise = int(node.values["steps"]), float(node.values["denoise"])
    if before is not None and before.end < 1:
        raise node.error(f"node {before.node.id} leaves noise, which a KSamplerAdvanced goes on with", "latent_image")
    if denoise > FULL:
        return _pass(node, steps, steps)
    total = min(steps / denoise, inf) if denoise > 0 else inf
    if total >= MAX_INFERENCE_STEPS + 1:
        problem = f"{steps} steps are the last of {total:.0f}, and a schedule has at most {MAX_INFERENCE_STEPS}"
        raise node.error(problem if denoise > 0 else "no step is run", "denoise")
    return _pass(node, steps, int(total))


def _of_advanced(node: Node, before: Pass | None) -> Pass:
    values = node.values
    total, start, end = int(values["steps"]), int(values["start_at_step"]), int(values["end_at_step"])
    end = min(end, total)
    if start >= end:
        raise node.error(f"it begins with step {start} and ends before step {end}, so no step is run", "start_at_step")
    if end < total and values["return_with_leftover_noise"] == "disable":
        raise node.error("its last step would go to no noise at once; give enable, or all steps", "end_at_step")
    last = end / total if end < total else 1.0
    if values["add_noise"] == "enable":
        if before is not None and before.end < 1:
            raise node.error(f"node {before.node.id} leaves noise, and no more is added to that", "add_noise")
        return replace(_pass(node, total - start, total), end=last)
    if before is None or before.end == 1.0:
        raise node.error("no sampler before it leaves noise to go on with", "add_noise")
    if (before.total, before.end) != (total, start / total):
        raise node.error(f"it does not go on where node {before.node.id} ends", "start_at_step")
    return replace(_pass(node, total, total), begin=start / total, end=last)


def _pass(node: Node, steps: int, total: int) -> Pass:
    """The last steps of all."""
    seed = int(node.values["seed" if node.kind == "KSampler" else "noise_seed"])
    sampler, schedule = str(node.values["sampler_name"]), str(node.values["scheduler"])
    return Pass(node, total, steps, seed & SEED_MASK, sampler, schedule)
