"""Load reports and shapes of edits for the router's tests. A step of the reference engine takes 6 ms plus 0.1 s for
each 4608 tokens in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.costs.load_report import (
    Begun,
    CopyLine,
    CostLine,
    EngineCosts,
    LoadReport,
    Queued,
    RequestLoad,
    ResidentPages,
)
from core.routing.request_shape import RequestShape
from core.routing.weights import Weights

PER_KILOTOKEN = 0.1 / 4.608
BASE = 0.006


def make_costs(factor: float = 1.0, other: float = 0.0) -> EngineCosts:
    """The costs of an engine that is this many times slower than the reference. other: seconds of each encode and
    decode.
    """
    steps = tuple(factor * seconds for seconds in (BASE, 0.0, PER_KILOTOKEN, 0.0, 0.0, 0.0))
    alone = (other, 0.0, 0.0, 0.0, 0.0, 0.0)
    lines = [CostLine("m", stage, steps) for stage in ("denoise", "prime")]
    lines += [CostLine("m", stage, alone) for stage in ("text_encode", "image_encode", "decode")]
    return EngineCosts(tuple(lines), (CopyLine("host", (0.0, factor * 2e-5)),))


COSTS, SLOW_COSTS = make_costs(), make_costs(2.0)


def load(steps_left: int = 10, step_seconds: float = 0.01, other_seconds: float = 0.0) -> RequestLoad:
    return RequestLoad(steps_left, step_seconds, other_seconds)


def make_report(
    num_received: int = 0,
    requests: Sequence[RequestLoad] = (),
    base_seconds: float = 0.0,
    priming_seconds: float = 0.0,
    resident_pages: Sequence[ResidentPages] = (),
    costs: EngineCosts | None = None,
    max_num_seqs: int = 8,
) -> LoadReport:
    """The first report of an engine that holds these requests, in this order within an owner."""
    num_running = min(len(requests), max_num_seqs)
    by_id = {f"r{index}": load for index, load in enumerate(requests)}
    running = {request_id: load for request_id, load in by_id.items() if load.is_running}
    return LoadReport(
        num_received=num_received,
        num_running=num_running,
        num_waiting=len(requests) - num_running,
        running=running,
        is_first=True,
        queue=(
            *(Queued(request_id, load, float(index)) for index, (request_id, load) in enumerate(by_id.items())),
            *(Begun(request_id, load.seconds) for request_id, load in running.items()),
        ),
        base_seconds=base_seconds,
        priming_seconds=priming_seconds,
        resident_pages=tuple(resident_pages),
        costs=costs,
    )


def make_shape(
    num_steps: int = 28,
    active_tokens: int = 600,
    template: str | None = None,
    num_keyframes: int = 3,
    image_tokens: int = 4096,
) -> RequestShape:
    is_exact = template is None and active_tokens == image_tokens
    full_steps = num_steps if is_exact else 0
    pages = (template, num_keyframes, 10**9) if template is not None else (None, 0, 0)
    tokens = active_tokens, image_tokens, 512
    return RequestShape("m", num_steps, full_steps, *tokens, *pages, needed=(Weights("m"),))
