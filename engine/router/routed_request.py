"""What the router knows of a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from core.late_adapters import LateAdapters
from core.messages.engine import EngineRequest, PrimeTemplate
from core.patches import PatchSet
from engine.router.engine_client import Waiter


@dataclass(slots=True)
class RoutedRequest:
    """The state of a request from submission to its terminal output.

    engine: the engine that has it; None while it waits for one to be up. sent: when it was sent there, seconds of
    CLOCK_MONOTONIC; predicted_seconds: its predicted time from then on.
    """

    message: EngineRequest | PrimeTemplate
    waiter: Waiter
    engine: int | None = None
    sent: float = 0.0
    predicted_seconds: float | None = None
    has_begun: bool = False  # a worker of that engine has begun it
    is_bystander: bool = False  # that engine died while other requests had begun, and this one had not
    num_deaths: int = 0  # engine deaths that it may have caused
    was_retried: bool = False  # sent again after an engine's death, whatever the cause
    is_aborted: bool = False  # its caller does not want it any more
    partials_delivered: set[int] = field(default_factory=set)  # indices of the partial images delivered

    def use_adapters(self, patches: PatchSet) -> None:
        """Have the request, if it is sent again, begin with its late adapters loaded. patches: all of its adapters."""
        self._replace(lambda late: msgspec.structs.replace(late, are_loaded=True), patches=patches)

    def note_adapters(self, step: int) -> None:
        """Have it repeat the step from which on it has them."""
        self._replace(lambda late: msgspec.structs.replace(late, least=step, most=step))

    def note_shown(self, step: int) -> None:
        """Have it repeat what a preview has shown: so many steps, without its late adapters unless they were noted."""
        self._replace(lambda late: msgspec.structs.replace(late, least=max(late.least, min(late.most, step))))

    def _replace(self, change: Callable[[LateAdapters], LateAdapters], **changes: PatchSet) -> None:
        """Change what is sent again of late adapters, if it has some."""
        message = self.message
        if isinstance(message, EngineRequest) and message.spec.late is not None:
            spec = msgspec.structs.replace(message.picture, late=change(message.spec.late), **changes)
            self.message = msgspec.structs.replace(message, spec=spec)
