"""Scheduling policies by name, one per file, and others by import path."""

import inspect
from importlib import import_module

from core.config import SchedulingPolicyName
from core.errors import ConfigError
from core.scheduling.policies.papers.ddit import Ddit
from core.scheduling.policies.papers.lego import Lego
from core.scheduling.policies.papers.neustream import NeuStream
from core.scheduling.policies.planner.default import Default
from core.scheduling.policies.policy import SchedulingPolicy

_POLICIES: dict[SchedulingPolicyName, type[SchedulingPolicy]] = {
    "default": Default,
    "neustream": NeuStream,
    "ddit": Ddit,
    "lego": Lego,
}


def policy_class(name: str) -> type[SchedulingPolicy]:
    """The class of this name, a SchedulingPolicyName or `module:Class`. Raises ConfigError if there is none."""
    return next((found for known, found in _POLICIES.items() if known == name), None) or _imported(name)


def make_policy(name: str) -> SchedulingPolicy:
    """A new policy object, which keeps the state of one scheduler. name: as for `policy_class`. Raises ConfigError."""
    try:
        return policy_class(name)()
    except TypeError as error:
        raise ConfigError(f"--scheduling-policy {name} is made without arguments, and this fails: {error}") from error


def _imported(name: str) -> type[SchedulingPolicy]:
    path, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"--scheduling-policy {name}: the policies are {', '.join(_POLICIES)}, and module:Class")
    try:
        found = getattr(import_module(path), attribute)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"--scheduling-policy {name}: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, SchedulingPolicy) and not inspect.isabstract(found)):
        raise ConfigError(
            f"--scheduling-policy {name}: {attribute} is no policy: derive it from "
            f"{SchedulingPolicy.__module__}:{SchedulingPolicy.__name__}, and define what that declares"
        )
    return found
