"""Optimization: one way in which the compiler rewrites a workflow's graph."""

from __future__ import annotations

from abc import ABC, abstractmethod

from core.graph.workflow import Workflow


class Optimization(ABC):
    """A user asks for it with its settings, which are attributes: `workflow.optimize(AsynchronousAdapters(steps=4))`.

    In LegoDiffusion these are passes (section 4.2); here passes are those over the noise levels, see `passes.py`.
    """

    @abstractmethod
    def rewrite(self, graph: Workflow) -> Workflow:
        """The graph with it: nodes inserted, removed or replaced, or told of the graph as a whole. `core.graph.check`
        has still to check it. Raises WorkflowError where the graph has nothing that it is for.
        """
