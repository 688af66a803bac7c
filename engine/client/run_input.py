"""RunInput: what a caller asks of a workflow of users' classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.sampling_params import MAX_PRIORITY, MAX_TIMEOUT, MIN_TIMEOUT
from core.validation import check_decimal, check_integer, conform
from engine.client.input_files import NO_FILES, InputFiles
from engine.client.run_values import RunValue


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInput:
    """Raises InvalidRequestError for a value of the wrong type or out of range; inputs are checked when it runs."""

    workflow: str  # name of one that is registered, see EngineConfig
    inputs: Mapping[str, RunValue] = field(default_factory=dict)  # by the names that it declares
    input_files: InputFiles = NO_FILES  # further ones
    rounds: tuple[int, ...] = ()  # of each of its regions that does not say it, at least 1
    owner: str = ""  # digest of an API key, "" = none
    priority: int = 0  # its class, 0 = the default, lower = more urgent
    timeout: float | None = None  # seconds until its results are useless

    def __post_init__(self) -> None:
        conform(self)
        check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.timeout is not None:
            check_decimal("timeout", self.timeout, MIN_TIMEOUT, MAX_TIMEOUT)
