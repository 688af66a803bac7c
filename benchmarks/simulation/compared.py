"""The scheduling policies that simulations compare: the default one of the engine, and those before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.baselines.former.elastic import Elastic
from benchmarks.baselines.former.goodput import Goodput
from benchmarks.baselines.former.step_batching import StepBatching
from core.scheduling.policies import make_policy
from core.scheduling.policies.policy import SchedulingPolicy

FORMER: Mapping[str, Callable[[], SchedulingPolicy]] = {
    "former step_batching": StepBatching,
    "former goodput": Goodput,
    "former elastic": Elastic,
}


OURS = "default"
"""Name of the policy that is compared with all others."""


def make(name: str) -> SchedulingPolicy:
    """A new policy: a former one, or one of the engine's. Raises ConfigError for an unknown name."""
    return FORMER[name]() if name in FORMER else make_policy(name)
