"""AsynchronousAdapters: steps begin while their adapters are still loading (LegoDiffusion, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from core.errors import WorkflowError
from core.graph.workflow import Workflow
from core.sampling_params import MAX_INFERENCE_STEPS
from core.validation import check_integer
from entrypoints.workflows.optimizations.optimization import Optimization


@dataclass(frozen=True)
class AsynchronousAdapters(Optimization):
    """Requests wait for adapters that are still loading only after so many of their steps, as with their field
    `steps_without_lora`. The paper's check node after each step is here a fact that the scheduler knows between two.
    """

    steps: int  # 1..MAX_INFERENCE_STEPS

    def __post_init__(self) -> None:
        """Raises InvalidRequestError."""
        check_integer("steps", self.steps, 1, MAX_INFERENCE_STEPS)

    def rewrite(self, graph: Workflow) -> Workflow:
        """Raises WorkflowError for a workflow whose denoiser has no adapters."""
        if not graph.loras:
            problem = "asynchronous adapters: its denoiser has none; attach them by add_patch"
            raise WorkflowError(f"workflow {graph.name}, {problem}", node="")
        return replace(graph, steps_without_lora=self.steps)
