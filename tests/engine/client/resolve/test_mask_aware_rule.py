"""The decision whether an edit runs mask-aware."""

from __future__ import annotations

import fakes
import msgspec
import pytest

from core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from core.graph.workflows.hires import HIRES
from core.graph.workflows.inpaint import INPAINT
from core.model_info import ModelInfo
from core.page_scheme import PageLayout, PageScheme
from core.sampling_params import SamplingParams
from core.step_schedule import StepSchedule
from engine.client.resolve.mask_aware import can_prime_ahead, fits, resolve_full_steps, resolve_margin, why_exact

SCHEME = PageScheme(
    layout=PageLayout(num_blocks=2, num_heads=2, head_dim=16, dtype="int8"),
    keyframes=(1.0, 0.5, 0.0),
    latent_bytes=256,
    fingerprint="f",
    guidance_scale=30.0,
    mask_margin=8,
    full_steps=1,
    full_steps_of=8,
    full_steps_from=0.25,
)
PER_STEP = msgspec.structs.replace(SCHEME, keyframes=())
MODEL = msgspec.structs.replace(fakes.MODEL, page_scheme=SCHEME)
TOKENS = 256


def engine(host_bytes: int = 2**30, device_bytes: int = 0, mask_aware: bool = True) -> EngineConfig:
    return EngineConfig(
        models=(ModelConfig(model="m", mask_aware=mask_aware),),
        cache=CacheConfig(host_bytes=host_bytes, device_bytes=device_bytes),
    )


def sampling(**fields: object) -> SamplingParams:
    return SamplingParams(num_inference_steps=8, **fields)  # type: ignore[arg-type]


def test_a_small_mask_runs_mask_aware() -> None:
    assert why_exact(sampling(), MODEL, engine(), INPAINT, TOKENS - 1, TOKENS) is None


@pytest.mark.parametrize("num_active", [0, 1, TOKENS])
def test_the_request_may_ask_for_exact(num_active: int) -> None:
    assert why_exact(sampling(mask_aware=False), MODEL, engine(), INPAINT, num_active, TOKENS) == "asked"


def test_a_workflow_that_is_not_mask_aware_runs_exact() -> None:
    two = sampling(hires_scale=2.0)
    assert why_exact(two, MODEL, engine(), HIRES, 9, TOKENS) == "hires"
    assert why_exact(two, fakes.MODEL, engine(), HIRES, 9, TOKENS) == "hires"
    assert why_exact(sampling(hires_scale=2.0, mask_aware=False), MODEL, engine(), HIRES, 9, TOKENS) == "asked"
    assert resolve_margin(sampling(hires_strength=0.5), MODEL, INPAINT) == SCHEME.mask_margin
    assert resolve_margin(two, MODEL, HIRES) == 0


def test_without_a_page_scheme_the_reason_is_the_flag_or_the_checkpoint() -> None:
    assert why_exact(sampling(), fakes.MODEL, engine(), INPAINT, 9, TOKENS) == "unsafe"
    assert why_exact(sampling(), fakes.MODEL, engine(mask_aware=False), INPAINT, 9, TOKENS) == "disabled"


def test_a_mask_over_everything_runs_exact() -> None:
    assert why_exact(sampling(), MODEL, engine(), INPAINT, TOKENS, TOKENS) == "mask_covers_all"


def test_full_steps_must_leave_a_step() -> None:
    assert why_exact(sampling(full_steps=7), MODEL, engine(), INPAINT, 9, TOKENS) is None
    assert why_exact(sampling(full_steps=8), MODEL, engine(), INPAINT, 9, TOKENS) == "full_steps"
    assert why_exact(sampling(full_steps=4, strength=0.5), MODEL, engine(), INPAINT, 9, TOKENS) == "full_steps"


def test_the_schemes_own_full_steps_must_leave_one_too() -> None:
    one_step = SamplingParams(num_inference_steps=1)
    assert why_exact(one_step, MODEL, engine(), INPAINT, TOKENS // 4, TOKENS) == "full_steps"
    assert why_exact(one_step, MODEL, engine(), INPAINT, TOKENS // 4 - 1, TOKENS) is None  # below full_steps_from


@pytest.mark.parametrize("tier", ["host_bytes", "device_bytes"])
def test_all_pages_must_fit_the_tier_that_computes(tier: str) -> None:
    need = SCHEME.template_bytes(TOKENS, 3)
    other = {"host_bytes": 0} if tier == "device_bytes" else {}
    assert why_exact(sampling(), MODEL, engine(**{tier: need} | other), INPAINT, 9, TOKENS) is None
    assert why_exact(sampling(), MODEL, engine(**{tier: need - 1} | other), INPAINT, 9, TOKENS) == "too_large"


def test_the_host_tier_does_not_compensate_for_a_small_device_tier() -> None:
    assert why_exact(sampling(), MODEL, engine(device_bytes=1), INPAINT, 9, TOKENS) == "too_large"


def test_several_ranks_read_clean_latents_in_host_memory() -> None:
    """With a device tier as without one."""
    need = SCHEME.latent_entry_bytes(TOKENS)
    room = {"device_bytes": SCHEME.template_bytes(TOKENS, 3), "host_bytes": need - 1}
    one = engine(**room)
    assert why_exact(sampling(), MODEL, one, INPAINT, 9, TOKENS) is None
    two = msgspec.structs.replace(one, workers_per_engine=2)
    assert why_exact(sampling(), MODEL, two, INPAINT, 9, TOKENS) == "too_large"
    enough = msgspec.structs.replace(two, cache=CacheConfig(**room | {"host_bytes": need}))
    assert why_exact(sampling(), MODEL, enough, INPAINT, 9, TOKENS) is None


def test_per_step_pages_count_by_the_steps_that_run() -> None:
    need = PER_STEP.template_bytes(TOKENS, 4)
    assert fits(PER_STEP, CacheConfig(host_bytes=need), 1, TOKENS, num_steps=4)
    assert not fits(PER_STEP, CacheConfig(host_bytes=need), 1, TOKENS, num_steps=5)
    model = msgspec.structs.replace(MODEL, page_scheme=PER_STEP)
    assert why_exact(sampling(strength=0.5), model, engine(host_bytes=need), INPAINT, 9, TOKENS) is None
    assert why_exact(sampling(), model, engine(host_bytes=need), INPAINT, 9, TOKENS) == "too_large"


def leading(asked: SamplingParams, model: ModelInfo, mask_ratio: float) -> int | None:
    """Number of leading full steps."""
    resolved = resolve_full_steps(asked, model, mask_ratio)
    assert not resolved.own_page_steps
    return resolved.full_steps


def test_defaults_come_from_the_scheme_and_zero_is_a_value() -> None:
    assert (resolve_margin(sampling(), MODEL, INPAINT), leading(sampling(), MODEL, 0.5)) == (8, 1)
    given = sampling(mask_margin=0, full_steps=0)
    assert (resolve_margin(given, MODEL, INPAINT), leading(given, MODEL, 0.5)) == (0, 0)
    assert resolve_margin(sampling(mask_aware=False, mask_margin=5), MODEL, INPAINT) == 0
    assert resolve_margin(sampling(mask_margin=5), fakes.MODEL, INPAINT) == 0
    assert leading(sampling(), fakes.MODEL, 0.5) == 0


@pytest.mark.parametrize(("mask_ratio", "expected"), [(0.0, 0), (0.2499, 0), (0.25, 1), (1.0, 1)])
def test_large_masks_get_full_steps(mask_ratio: float, expected: int) -> None:
    assert leading(sampling(), MODEL, mask_ratio) == expected
    assert leading(sampling(full_steps=3), MODEL, mask_ratio) == 3


@pytest.mark.parametrize(("num_steps", "expected"), [(1, 1), (4, 1), (8, 1), (9, 2), (16, 2), (28, 4), (200, 25)])
def test_full_steps_are_a_share_of_all_steps(num_steps: int, expected: int) -> None:
    asked = SamplingParams(num_inference_steps=num_steps)
    assert leading(asked, MODEL, 0.5) == expected
    assert leading(asked, MODEL, 0.2) == 0


def test_a_weak_edit_has_full_steps_of_those_it_runs() -> None:
    assert leading(SamplingParams(num_inference_steps=28, strength=0.5), MODEL, 0.5) == 2


def test_without_a_ratio_every_mask_gets_full_steps() -> None:
    model = msgspec.structs.replace(MODEL, page_scheme=msgspec.structs.replace(SCHEME, full_steps_from=0.0))
    assert leading(sampling(), model, 1 / TOKENS) == 1


def test_pages_can_be_primed_before_any_edit_if_they_fit() -> None:
    need = SCHEME.template_bytes(TOKENS, 3)
    per_step = msgspec.structs.replace(MODEL, page_scheme=PER_STEP)
    assert can_prime_ahead(MODEL, CacheConfig(host_bytes=need), 1, TOKENS)
    assert not can_prime_ahead(MODEL, CacheConfig(host_bytes=need - 1), 1, TOKENS)
    assert not can_prime_ahead(per_step, CacheConfig(), 1, TOKENS)
    assert not can_prime_ahead(fakes.MODEL, CacheConfig(), 1, TOKENS)


SCHEDULE = StepSchedule(
    num_inference_steps=8,
    computed=(0, 1, 2, 4, 6),
    full_steps=(0, 2),
    full_steps_from=0.5,
    ssim_mean=0.99,
    ssim_p10=0.98,
)
SKIPPING = msgspec.structs.replace(MODEL, step_schedules=(SCHEDULE,))


def calibrated(**fields: object) -> SamplingParams:
    return sampling(step_schedule="calibrated", computed_steps=SCHEDULE.computed, **fields)


@pytest.mark.parametrize(
    ("asked", "mask_ratio", "expected"),
    [
        (calibrated(), 0.5, ((0, 2), 0)),
        (calibrated(), 0.49, ((), 0)),
        (calibrated(strength=0.5), 0.5, ((0,), 0)),  # of two steps, one is left to read pages
        (calibrated(full_steps=1), 0.5, ((), 1)),
        (calibrated(own_page_steps=()), 0.5, ((), 0)),
        (calibrated(own_page_steps=(0, 4, 7)), 0.1, ((0, 4), 0)),
        (sampling(own_page_steps=(0, 4)), 0.5, ((0, 4), 0)),
        (sampling(), 0.5, ((), 1)),
    ],
)
def test_large_masks_with_a_schedule_have_pages_of_their_own(
    asked: SamplingParams, mask_ratio: float, expected: tuple[tuple[int, ...], int]
) -> None:
    resolved = resolve_full_steps(asked, SKIPPING, mask_ratio)
    assert (resolved.own_page_steps, resolved.full_steps) == expected
    assert resolve_full_steps(resolved, SKIPPING, mask_ratio) == resolved


def test_steps_that_all_make_own_pages_are_exact() -> None:
    assert why_exact(calibrated(own_page_steps=(0, 1, 2, 3)), SKIPPING, engine(), INPAINT, 9, TOKENS) is None
    assert why_exact(calibrated(own_page_steps=(0, 1, 2, 3, 4)), SKIPPING, engine(), INPAINT, 9, TOKENS) == "full_steps"


def test_own_pages_of_all_slots_must_fit_and_templates_need_not() -> None:
    """They are int8 whatever the template's are."""
    need = SchedulerConfig().max_num_seqs * SCHEME.layout.entry_bytes(TOKENS)
    wide = msgspec.structs.replace(SCHEME, layout=msgspec.structs.replace(SCHEME.layout, dtype="float32"))
    assert wide.own_page_bytes(TOKENS) == SCHEME.layout.entry_bytes(TOKENS) < wide.layout.entry_bytes(TOKENS)
    assert need > SCHEME.template_bytes(TOKENS, 3)
    assert why_exact(calibrated(), SKIPPING, engine(host_bytes=need), INPAINT, TOKENS // 2, TOKENS) is None
    assert why_exact(calibrated(), SKIPPING, engine(host_bytes=need - 1), INPAINT, TOKENS // 2, TOKENS) == "too_large"
    assert why_exact(calibrated(), SKIPPING, engine(host_bytes=need - 1), INPAINT, 9, TOKENS) is None
    long = msgspec.structs.replace(SCHEME, keyframes=tuple(1 - i / 40 for i in range(41)))
    wide = msgspec.structs.replace(SKIPPING, page_scheme=long)
    assert why_exact(calibrated(), wide, engine(host_bytes=need), INPAINT, TOKENS // 2, TOKENS) is None
    assert why_exact(calibrated(), wide, engine(host_bytes=need), INPAINT, 9, TOKENS) == "too_large"
