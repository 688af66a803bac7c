"""LoadReport and EngineStats: what an engine tells its router, and what it tells whoever watches it.

A report goes out when something that it says has changed (a request came, began or ended; pages came or went), not at
every step: in between, the router reckons how far the steps have come. All times are seconds, predicted by the engine's
cost model unless a name says otherwise.
"""

from __future__ import annotations

import msgspec

from core.handles import ModelKey, Tier


class RequestLoad(msgspec.Struct, frozen=True, array_like=True):
    """What is left of one image. step_seconds: what it adds to a step of its batch, the mean over its steps left.
    other_seconds: encoding, decoding and what else is done for it alone. priority: lower goes first. is_running: it
    keeps its place, whoever comes. arrival: monotonic seconds.
    """

    steps_left: int
    step_seconds: float
    other_seconds: float
    priority: int = 0
    is_running: bool = False
    arrival: float = 0.0
    owner: str = ""

    @property
    def seconds(self) -> float:
        """What it costs in all, the constant part of its steps aside."""
        return self.steps_left * self.step_seconds + self.other_seconds


class Residency(msgspec.Struct, frozen=True, array_like=True):
    """Which of a template's pages an engine has: keyframes that are ready where they are computed from, and those that
    lie on a slower tier in memory only; what is in files only the disk knows.

    template: PageScheme.template_key of its content.
    """

    template: str
    num_ready: int
    num_below: int


class CostLine(msgspec.Struct, frozen=True, array_like=True):
    """How long a batch of this stage takes: coefficients of core.cost_model.FEATURES."""

    model: ModelKey
    stage: str
    coefficients: tuple[float, ...]


class CopyLine(msgspec.Struct, frozen=True, array_like=True):
    """How long a copy of pages from `source` to the next faster tier takes: coefficients of COPY_FEATURES."""

    source: Tier
    coefficients: tuple[float, ...]


class EngineCosts(msgspec.Struct, frozen=True):
    """An engine's cost model as it is now."""

    lines: tuple[CostLine, ...]
    copies: tuple[CopyLine, ...]


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """How busy an engine is: its drain summary.

    num_received: edits and templates that it has taken in since start; what was sent later is not in the report.
    requests: the images it holds, most urgent first, running ones included. base_seconds: what a step takes whoever is
    in it, 0 if nobody is. priming_seconds: work left on templates' pages. drain_seconds: until all that it holds is
    done. residency: templates whose pages have come or gone since the last report. costs: None where they are as
    before. begun: ids of the edits that a worker was given for the first time since the last report.
    """

    num_received: int
    num_running: int
    num_waiting: int
    requests: tuple[RequestLoad, ...] = ()
    base_seconds: float = 0.0
    priming_seconds: float = 0.0
    drain_seconds: float = 0.0
    residency: tuple[Residency, ...] = ()
    costs: EngineCosts | None = None
    begun: tuple[str, ...] = ()


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the activation cache did since start, counted in entries (one template at one noise level), and what it
    holds. Dictionaries are by tier.

    hits, misses: entries asked for that were on any tier, or on none. loads: copies into a faster tier, and how many of
    them found a file that was missing, torn or foreign. failed_stores: copies to a slower tier that it did not take: no
    room on the disk, say. used_bytes <= budget_bytes always.
    """

    hits: dict[str, int]
    misses: int
    primed: int
    evictions: dict[str, int]
    loads: dict[str, int]
    failed_loads: int
    failed_stores: int
    entries: dict[str, int]
    used_bytes: dict[str, int]
    budget_bytes: dict[str, int]
    load_seconds: float


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """One denoising step: images and computed tokens in its batch, worker seconds, and what the cost model predicted.

    bound_seconds: the part of the prediction that grows with the tokens, which no batching saves. started: monotonic
    seconds, the same clock in all processes of a host. request_ids: whose images, one each.
    """

    num_requests: int
    num_tokens: int
    seconds: float
    predicted_seconds: float
    bound_seconds: float
    started: float = 0.0
    request_ids: tuple[str, ...] = ()


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has done since start, and what it knows. recent_steps: the steps since the last such message
    but those that were done in parts, of which nothing was predicted.

    stage_seconds: predicted work left per stage. resident_models: loaded components. r_squared: how well each stage's
    cost is predicted, 1 = exactly. batch_tokens, batch_requests: sums over steps of tokens computed and of images in
    the batch. tokens_skipped: image tokens that mask-aware execution left out. busy_seconds: worker time of each
    stage, all ranks. cache: None without mask-aware execution.
    """

    stage_seconds: dict[str, float]
    resident_models: tuple[ModelKey, ...]
    r_squared: dict[str, float]
    steps: int
    batch_tokens: int
    batch_requests: int
    tokens_skipped: int
    prime_chunks: int
    busy_seconds: dict[str, float]
    recent_steps: tuple[StepSample, ...] = ()
    cache: CacheStats | None = None
