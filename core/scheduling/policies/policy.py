"""SchedulingPolicy: decides which ready work runs together, and on which ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from core.messages.worker import Batch, BatchResult
from core.scheduling.dispatch import Copy, Decision, Loads
from core.scheduling.model_demand import ModelDemand
from core.scheduling.policies.where_needed import where_needed
from core.scheduling.requests.request import Request
from core.scheduling.view import View


class SchedulingPolicy(ABC):
    """Base class of policies. A policy is pure: it knows what the view shows and what its methods are called with. It
    never sees tensors, sockets or clocks, and changes nothing but its own state: the scheduler checks its decisions and
    carries them out.
    """

    spreads_models = True
    """Whether each model may be loaded on some ranks only, so that the policy chooses among the ranks that have what a
    node needs (`View.ranks_with`). If not, all ranks load the same."""

    copies: tuple[Copy, ...] = ()
    """What the policy wants to be loaded without a request that cannot begin before, as of its last pass."""

    def loads(self, demand: ModelDemand, now: float) -> Loads:
        """What to load and drop now, and which waiting requests may begin. Called before `choose` when something has
        changed, `copies` among it, until all that is served is loaded on all ranks. now: monotonic seconds.
        """
        return where_needed(demand, now, self.copies)

    @abstractmethod
    def choose(self, view: View, now: float) -> Sequence[Decision]:
        """What to dispatch now, in the order in which ranks are to run it. Called while a rank may be given work. A
        rank that gets none is missing from the view's open ranks until the next event. now: monotonic seconds.
        """

    def page_rank(self, template: str, ranks: Sequence[int]) -> int:
        """The rank on whose device to put the pages of a template that are on no device yet. The steps that read them
        run there. template: its key. ranks: those that live, ascending. Without device memory for pages every rank
        can read all pages, and the answer does not matter.
        """
        return ranks[0]

    def on_arrival(self, request: Request) -> None:
        """Called when a request is added."""

    def on_adapters(self, request: Request) -> None:
        """Called when a request's late adapters are loaded, for which it may have waited."""

    def on_result(self, batch: Batch, result: BatchResult) -> None:
        """Called when all ranks of a batch have answered. result: their common result."""

    def on_end(self, request_id: str) -> None:
        """Called when a request has got its terminal message."""
