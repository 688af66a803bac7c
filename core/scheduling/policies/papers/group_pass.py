"""GroupPass: a pass in which requests run on ranks of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from core.graph.workflow import Node
from core.handles import RankIds
from core.scheduling.policies.step_pass import StepPass
from core.scheduling.requests.request import Request


@dataclass(slots=True)
class GroupPass(StepPass):
    """A request's steps run on its group of ranks, and all its other nodes on the first rank of the group."""

    groups: Mapping[str, RankIds] = field(default_factory=dict)  # request id -> ranks
    admitted: Sequence[Request] = ()  # requests that may run something, the most urgent first

    def _admit(self) -> list[Request]:
        """The admitted requests that have an open rank in their group; most passes need few of them."""
        return [each for each in self.admitted if not self.view.open_ranks.isdisjoint(self.groups[each.id])]

    def _rank(self, request: Request, node: Node) -> int:
        device = self._device(request, node)
        return self.groups[request.id][0] if device is None else device

    def _ranks(self, request: Request, node: Node) -> RankIds:
        is_step = node.name in request.workflow.step_names and self._device(request, node) is None
        return self.groups[request.id] if is_step else (self._rank(request, node),)
