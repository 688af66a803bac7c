"""Scheduling policies by name, one per file."""

from core.config import SchedulingPolicyName
from core.scheduling.policies.ddit import Ddit
from core.scheduling.policies.elastic import Elastic
from core.scheduling.policies.goodput import Goodput
from core.scheduling.policies.neustream import NeuStream
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.policies.step_batching import StepBatching

_POLICIES: dict[SchedulingPolicyName, type[SchedulingPolicy]] = {
    "step_batching": StepBatching,
    "goodput": Goodput,
    "neustream": NeuStream,
    "elastic": Elastic,
    "ddit": Ddit,
}


def make_policy(name: SchedulingPolicyName) -> SchedulingPolicy:
    """A new policy object, which keeps the state of one scheduler."""
    return _POLICIES[name]()
