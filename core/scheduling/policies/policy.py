"""SchedulingPolicy: decides which ready work runs together, and on which ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from core.messages.worker import Batch, BatchResult
from core.scheduling.dispatch import Decision
from core.scheduling.requests.request import Request
from core.scheduling.view import View


class SchedulingPolicy(ABC):
    """Base class of policies. A policy is pure: it knows what the view shows and what it was called with. It never sees
    tensors, sockets or clocks, and changes nothing but its own state: the scheduler checks its decisions and carries
    them out.
    """

    gives_up = False
    """Whether it decides which requests are too late (`GiveUp`), and is shown all that are not hopeless; otherwise
    `Deadlines` does, and admission refuses those that are predicted to be late."""

    shares_steps = False
    """Whether several ranks compute a step together where that is useful, whatever `SchedulerConfig.degree` says."""

    @abstractmethod
    def choose(self, view: View, now: float) -> Sequence[Decision]:
        """What to dispatch now, in the order in which ranks are to run it. Called while a rank may be given work; of
        one that gets none the view says so again only when something has happened. now: monotonic seconds.
        """

    def page_rank(self, template: str, ranks: Sequence[int]) -> int:
        """The rank on whose device the pages of a template are to be, if they are on none: where the steps that read
        them are to run. template: its key. ranks: those that live, ascending. Without device memory for pages every
        rank reads all of them.
        """
        return ranks[0]

    def on_arrival(self, request: Request) -> None:
        """Called when a request is added."""

    def on_result(self, batch: Batch, result: BatchResult) -> None:
        """Called when all ranks of a batch have answered. result: of all of them."""

    def on_end(self, request_id: str) -> None:
        """Called when a request has got its terminal output."""
