"""Whether an edit takes part in approximate caching, see `core.skip_level`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from core.config import StencilConfig
from core.errors import InvalidRequestError
from core.graph.recalling import recalled_name
from core.graph.workflow import Workflow
from core.model_info import ModelInfo
from core.sampling_params import SamplingParams
from core.skip_level import SkipLevel, skips_of
from engine.client.sessions.prepared_edit import PreparedEdit

FIELD = "approximate_caching"


def wants_caching(sampling: SamplingParams, model: ModelInfo, workflow: Workflow, config: StencilConfig) -> bool:
    """Whether an edit asks for approximate caching, or its workflow does and the server can do it. sampling: as it was
    asked for. Raises InvalidRequestError if the edit asks for it and the server cannot.
    """
    if sampling.approximate_caching is False or model.num_classes:
        return False
    problem = ""
    if not config.approximate_cache_bytes:
        problem = "the server keeps no states; have it started with --approximate-cache-bytes"
    elif not levels_of(model, config):
        problem = f"{model.name} has no calibrated skip levels; run python -m entrypoints.calibrate --skip-levels"
    if sampling.approximate_caching and problem:
        raise InvalidRequestError(f"Invalid '{FIELD}': {problem}, or leave it out.", param=FIELD)
    return not problem and bool(sampling.approximate_caching or workflow.approximate_caching)


def levels_of(model: ModelInfo, config: StencilConfig) -> Sequence[SkipLevel]:
    """The skip levels of a model."""
    return model.skip_levels if config.skip_levels is None else config.skip_levels


def can_recall(edit: PreparedEdit, levels: Sequence[SkipLevel], workflows: Collection[str]) -> bool:
    """Whether an edit that asks for it can keep states, and recall some: without a mask, since outside of one nothing
    is a question of the prompt; steered neither by control pictures nor by adapters that come late; in one loop, by a
    sampler with one call of the model for each step, which depends on the latents alone, as states hold nothing else;
    and with enough steps that any may be skipped. workflows: names of those that engines run.
    """
    model, images = edit.model, edit.prepared
    is_whole = images.unmasked and images.crop is None and edit.edit.mask_request is None
    is_steered = bool(edit.controls.controls) or edit.choice.steps_without > 0
    is_plain = not is_steered and model.solver_order == 1 and not model.extra_steps and not model.remembers_steps
    has_variant = recalled_name(edit.graph.name) in workflows
    return is_whole and is_plain and has_variant and bool(skips_of(levels, sum(edit.rounds)))
