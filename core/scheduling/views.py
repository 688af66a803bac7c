"""Views: makes what a scheduling policy sees in a pass from what the scheduler has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from core.config import SchedulerConfig
from core.failure import Failure
from core.scheduling.deadlines import Deadlines
from core.scheduling.in_flight import InFlight
from core.scheduling.live_requests import LiveRequests
from core.scheduling.node_cache import NodeCache
from core.scheduling.predictor import Predictor
from core.scheduling.ranks import Ranks
from core.scheduling.request import Request
from core.scheduling.residency import Residency
from core.scheduling.step_limit import StepLimit
from core.scheduling.values import ValueTable
from core.scheduling.view import View


@dataclass(frozen=True, slots=True)
class Views:
    """Of one scheduler. deadlines: who decides which requests are too late; None: the policy itself."""

    config: SchedulerConfig
    requests: LiveRequests
    ranks: Ranks
    out: InFlight
    residency: Residency
    cache: NodeCache
    values: ValueTable
    predictor: Predictor
    step_limit: StepLimit
    deadlines: Deadlines | None

    def lost(self, now: float) -> Iterator[tuple[Request, Failure]]:
        """Requests that are too late, with the reason, unless the policy decides that."""
        return iter(()) if self.deadlines is None else self.deadlines.lost(self._judged(), now)

    @property
    def open_ranks(self) -> frozenset[int]:
        """Ranks that may be given work."""
        return self._idle_ranks | self._nearly_idle_ranks

    def view(self, now: float, left: frozenset[int] = frozenset()) -> View:
        """What can be decided now. left: ranks that are to get no work."""
        judged = [] if self.deadlines is None else self._judged()
        return View(
            config=self.config,
            requests=self.requests,
            ranks=self.ranks.up,
            open_ranks=self.open_ranks - left,
            idle_ranks=self._idle_ranks - left,
            max_step_tokens=self.step_limit.tokens,
            may_join=self.deadlines.joining(judged, now) if self.deadlines is not None and judged else None,
            _wait=partial(self.out.wait, now=now),
            _left=partial(self.out.left, now=now),
            _residency=self.residency,
            _cache=self.cache,
            _values=self.values,
            _predict=self.predictor.of_op,
            _predict_step=self.predictor.of_step,
            _largest=self.predictor.largest_batch,
        )

    def _judged(self) -> list[Request]:
        """Those that deadlines are about: none, where no request has a due time."""
        return list(self.requests.live()) if self.requests.has_due else []

    @property
    def _idle_ranks(self) -> frozenset[int]:
        return self.out.idle_ranks.intersection(self.ranks.up)

    @property
    def _nearly_idle_ranks(self) -> frozenset[int]:
        """Busy ranks that may be given work: nearly done, so that the round trip of a small step is hidden behind their
        work, and new requests do not wait long. Nothing is sent ahead while a preview is pending, which would delay it.
        """
        return frozenset() if self.requests.has_pending_previews else self.out.nearly_idle_ranks
