"""Optimizations: what the compiler may do to a workflow's graph, without a change of the workflow. One file each."""

from __future__ import annotations

from collections.abc import Collection

from core.graph.workflow import Workflow
from entrypoints.workflows.optimizations.approximate_caching import ApproximateCaching
from entrypoints.workflows.optimizations.asynchronous_adapters import AsynchronousAdapters
from entrypoints.workflows.optimizations.optimization import Optimization

OPTIMIZATIONS: tuple[type[Optimization], ...] = (AsynchronousAdapters, ApproximateCaching)
"""All that there are, in the order in which they are applied."""

__all__ = ["OPTIMIZATIONS", "ApproximateCaching", "AsynchronousAdapters", "Optimization", "optimized"]


def optimized(graph: Workflow, asked: Collection[Optimization]) -> Workflow:
    """The graph with what was asked for. asked: each kind at most once. Raises WorkflowError."""
    for each in sorted(asked, key=lambda each: OPTIMIZATIONS.index(type(each))):
        graph = each.rewrite(graph)
    return graph
