"""Decides whether an edit runs mask-aware: once, from the request and the server's flags alone.

Load, tiers and the cache's content do not matter, so that the same request always gives the same picture.
"""

from __future__ import annotations

import msgspec

from core.config import CacheConfig, EngineConfig
from core.graph.workflow import Workflow
from core.model_info import ModelInfo
from core.page_scheme import PageScheme
from core.sampling_params import SamplingParams
from core.step_schedule import schedule_for

ExactReason = str
"""Why an edit computes every token. asked: the request says so. disabled: the server's flags say so. unsafe: the
checkpoint's calibration found no setting that keeps the picture, or its family has no mask-aware execution.
mask_covers_all: the mask with its margin touches every token. too_large: the picture's pages exceed the cache.
full_steps: all steps are full steps. late_adapters: its first steps may run without its adapters. Otherwise the name
of the workflow, one that always does, such as "hires".
"""


def resolve_margin(sampling: SamplingParams, model: ModelInfo, workflow: Workflow) -> int:
    """Pixels at generation size by which the mask is grown; 0 if every token is computed anyway."""
    if model.page_scheme is None or not (sampling.mask_aware and workflow.is_mask_aware):
        return 0
    return model.page_scheme.mask_margin if sampling.mask_margin is None else sampling.mask_margin


def resolve_full_steps(sampling: SamplingParams, model: ModelInfo, mask_ratio: float) -> SamplingParams:
    """sampling with its full steps set: the leading ones, before steps that read the template's pages, or those whose
    own pages the others read. sampling: with num_inference_steps set. mask_ratio: active tokens / image tokens, margin
    included.
    """
    num_steps, own, full = model.num_steps(sampling), sampling.own_page_steps, sampling.full_steps
    is_calibrated = sampling.step_schedule == "calibrated"
    if own is None and full is None and is_calibrated and model.page_scheme is not None:
        assert sampling.num_inference_steps is not None
        own = schedule_for(model.step_schedules, sampling.num_inference_steps).full_steps_at(mask_ratio, num_steps)
    own = tuple(step for step in own or () if step < num_steps)
    if full is None:
        has_default = model.page_scheme is not None and not (own or is_calibrated)
        full = model.page_scheme.full_steps_at(mask_ratio, num_steps) if has_default and model.page_scheme else 0
    return msgspec.structs.replace(sampling, own_page_steps=own, full_steps=full)


def why_exact(
    sampling: SamplingParams,
    model: ModelInfo,
    engine: EngineConfig,
    workflow: Workflow,
    num_active: int,
    num_tokens: int,
    num_reference_tokens: int = 0,
) -> ExactReason | None:
    """Why an edit with `num_active` active of `num_tokens` image tokens runs exactly; None if it runs mask-aware.

    sampling: resolved. num_reference_tokens: of its references together.
    """
    scheme, num_steps = model.page_scheme, model.num_steps(sampling)
    if not sampling.mask_aware:
        return "asked"
    if not workflow.is_mask_aware:
        return workflow.name
    if scheme is None:
        return "unsafe" if _is_wanted(model, engine) else "disabled"
    if num_active >= num_tokens:
        return "mask_covers_all"
    full = resolve_full_steps(sampling, model, num_active / num_tokens)
    if (len(full.own_page_steps or ()) or full.full_steps or 0) >= num_steps:
        return "full_steps"
    if num_reference_tokens:
        conditions = model.num_condition_tokens(num_tokens, has_template=True, reference_tokens=num_reference_tokens)
        scheme = scheme.with_conditions(conditions)
    num_ranks = engine.workers_per_engine
    has_room = (
        own_pages_fit(scheme, engine, num_tokens, sampling.num_rows)
        if full.own_page_steps
        else fits(scheme, engine.cache, num_ranks, num_tokens, num_steps, num_reference_tokens)
    )
    return None if has_room else "too_large"


def own_pages_fit(scheme: PageScheme, engine: EngineConfig, num_tokens: int, num_rows: int) -> bool:
    """Whether as many requests as may run together can have pages of their own: they get as much memory as the tier
    that other edits compute from. num_rows: of a request."""
    cache, most = engine.cache, engine.scheduler.max_num_seqs * num_rows * scheme.own_page_bytes(num_tokens)
    return most <= (cache.device_bytes or cache.host_bytes)


def fits(
    scheme: PageScheme,
    cache: CacheConfig,
    num_ranks: int,
    num_tokens: int,
    num_steps: int,
    num_reference_tokens: int = 0,
) -> bool:
    """Whether all pages of one template fit the tier that edits compute from, and its clean latents the one that all
    ranks of an engine read. num_steps matters only for a scheme that keeps pages of every step.
    """
    if num_ranks > 1 and scheme.latent_entry_bytes(num_tokens + num_reference_tokens) > cache.host_bytes:
        return False
    budget = cache.device_bytes or cache.host_bytes
    return scheme.template_bytes(num_tokens, len(scheme.keyframes) or num_steps, num_reference_tokens) <= budget


def can_prime_ahead(model: ModelInfo, cache: CacheConfig, num_ranks: int, num_tokens: int) -> bool:
    """Whether a template's pages can be primed before any edit of it. Pages of every step cannot: their noise levels
    depend on the edit's number of steps.
    """
    scheme = model.page_scheme
    return scheme is not None and bool(scheme.keyframes) and fits(scheme, cache, num_ranks, num_tokens, num_steps=0)


def _is_wanted(model: ModelInfo, engine: EngineConfig) -> bool:
    return any(config.mask_aware for config in engine.models if config.name == model.name)
