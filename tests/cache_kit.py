"""A scheduler with an activation cache on fake workers, and mask-aware requests for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fakes import MODEL, FakePages, FakeWorkers, make_edit, with_spec

from core.cache.activation_cache import ActivationCache
from core.cache.request_pages import RequestPages
from core.config import CacheConfig, SchedulerConfig
from core.handles import ArrayRef
from core.messages.engine import EngineRequest, Finished, PrimeTemplate
from core.messages.worker import BatchResult, StepPlan
from core.model_info import ModelInfo
from core.page_scheme import PageLayout, PageScheme
from core.scheduling.scheduler import StepScheduler
from core.vision_tokens import VisionTokens

GRID = (1.0, 0.75, 0.5, 0.25, 0.0)
LAYOUT = PageLayout(num_blocks=7, num_heads=4, head_dim=64, dtype="int8")
SCHEME = PageScheme(
    layout=LAYOUT, keyframes=GRID, latent_bytes=256, fingerprint="f", guidance_scale=30.0, mask_margin=8, full_steps=0
)
TEMPLATE_BYTES = SCHEME.template_bytes(256, 5)
ROOMY = CacheConfig(host_bytes=8 * TEMPLATE_BYTES)
SEEING = msgspec.structs.replace(MODEL, vision=VisionTokens(side=28, min_pixels=28 * 28, max_pixels=1 << 20))
"""A model whose text encoder sees the template: priming reads its pixels too."""

AHEAD = {"max_plans_in_flight": 2, "max_ahead_ms": 1e9}
"""A second plan is sent, whatever the first one takes."""


def make_masked(
    request_id: str, *, content: str = "c0", steps: int = 8, active: int = 26, full_steps: int = 0, arrival: float = 0.0
) -> EngineRequest:
    edit = make_edit(request_id, steps=steps, arrival=arrival)
    return with_spec(
        edit,
        content_id=content,
        active=ArrayRef(0, 0, (active,), "int32"),
        is_mask_aware=True,
        sampling=msgspec.structs.replace(edit.spec.sampling, full_steps=full_steps),
    )


def make_registration(request_id: str, content: str = "c0", *, is_idle_work: bool = False) -> PrimeTemplate:
    edit = make_edit(request_id)
    return PrimeTemplate(request_id, "m", edit.spec.template, 256, 256, content, 256, 0.0, is_idle_work)


class Engine:
    """A scheduler on fake workers, with a cache of this many bytes."""

    def __init__(
        self,
        scheme: PageScheme = SCHEME,
        cache: CacheConfig = ROOMY,
        model: ModelInfo = MODEL,
        device_bytes: Sequence[int] = (0,),
        **limits: Any,
    ) -> None:
        """device_bytes: by rank, device memory for pages."""
        model, num_ranks = msgspec.structs.replace(model, page_scheme=scheme), len(device_bytes)
        config = SchedulerConfig(**limits)
        self.scheduler = StepScheduler(config, {"m": model}, num_ranks, cache, device_page_bytes=device_bytes)
        self.workers = FakeWorkers(num_ranks, pages=FakePages(LAYOUT.num_blocks))
        self.outputs: list[object] = []

    @property
    def cache(self) -> ActivationCache:
        assert isinstance(self.scheduler.cache, ActivationCache)
        return self.scheduler.cache

    def pages_of(self, request_id: str) -> RequestPages:
        """The cache's record of a request."""
        return self.cache._prefetcher.records[request_id]

    def step(self) -> StepPlan | None:
        """One iteration."""
        plan = self.scheduler.schedule(now=0.0)
        if plan is not None:
            self.workers.submit(plan)
        for rank in range(self.workers.num_ranks):
            self.finish_plan(rank)
        return plan

    def finish_plan(self, rank: int = 0) -> None:
        """Let a rank do the oldest plan that it has, as far as it can."""
        for result in self.workers.run_one(rank):
            if isinstance(result, BatchResult):
                self.scheduler.apply(result)
            else:
                self.scheduler.apply_transfer(result)
        self.run_until_idle()

    def run_until_idle(self) -> None:
        self.outputs += self.scheduler.take_outputs()
        self.scheduler.check_integrity()

    def finish_copies(self) -> None:
        while self.workers.pages.copies:
            self.scheduler.apply_copy(self.workers.pages.finish_copy(0))
        self.run_until_idle()

    def run(self, until: Callable[[], bool] | None = None) -> None:
        for _ in range(10_000):
            if until() if until else not self.scheduler.num_requests:
                return
            self.step()
            self.finish_copies()
        raise AssertionError("it never ended")

    def result(self, request_id: str) -> object:
        (found,) = [output for output in self.outputs if output.request_id == request_id]  # type: ignore[attr-defined]
        return found

    def finished(self, request_id: str) -> Finished:
        found = self.result(request_id)
        assert isinstance(found, Finished), found
        return found
