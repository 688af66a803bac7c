"""Times calls, for profiles."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from model_executor.device_failures import wait_for_device

TIMES = 3
"""Calls after the first one, whose median counts."""


def median_seconds(run: Callable[[], object]) -> float:
    """Seconds of a call, of a median one. The first is not counted: at a new size it takes longer."""
    _seconds(run)
    return statistics.median(_seconds(run) for _ in range(TIMES))


def _seconds(run: Callable[[], object]) -> float:
    started = time.monotonic()
    run()
    wait_for_device()
    return time.monotonic() - started
