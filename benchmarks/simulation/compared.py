"""The scheduling policies that simulations compare: `default`, where the engine has it, and those before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.baselines.former.elastic import Elastic
from benchmarks.baselines.former.goodput import Goodput
from benchmarks.baselines.former.step_batching import StepBatching
from core.errors import ConfigError
from core.scheduling.policies import make_policy, policy_class
from core.scheduling.policies.policy import SchedulingPolicy

Make = Callable[[], SchedulingPolicy]

FORMER: Mapping[str, Make] = {
    "former step_batching": StepBatching,
    "former goodput": Goodput,
    "former elastic": Elastic,
}


def _default() -> dict[str, Make]:
    try:
        policy_class("default")
    except ConfigError:
        return {}
    return {"default": lambda: make_policy("default")}


DEFAULT: Mapping[str, Make] = _default()
"""Empty where the engine has no policy of this name yet."""


def make(name: str) -> SchedulingPolicy:
    """A new policy: a former one, or one of the engine's. Raises ConfigError for an unknown name."""
    return FORMER[name]() if name in FORMER else make_policy(name)
