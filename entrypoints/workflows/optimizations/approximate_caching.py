"""ApproximateCaching: pictures begin in the state of an earlier one with a similar prompt (LegoDiffusion, section 4.2;
Nirvana, Agarwal et al., NSDI 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from core.errors import WorkflowError
from core.graph.recalling import can_recall
from core.graph.workflow import Workflow
from entrypoints.workflows.optimizations.optimization import Optimization


@dataclass(frozen=True)
class ApproximateCaching(Optimization):
    """Requests that do not say otherwise keep their states and recall earlier ones, as with their field
    `approximate_caching`. The graph of one that recalls has a node that looks up its first latents instead of the one
    that makes them, see `core.graph.recalling`.
    """

    def rewrite(self, graph: Workflow) -> Workflow:
        """Raises WorkflowError for a workflow whose latents do not come about in one loop, from noise."""
        if not can_recall(graph):
            problem = "approximate caching: it needs one loop of steps that begins with noise and reads a prompt"
            raise WorkflowError(f"workflow {graph.name}, {problem}", node="")
        return replace(graph, approximate_caching=True)
