"""The catalog: workflows by name."""

from __future__ import annotations

from core.graph.workflow import HIRES, INPAINT, Workflow

WORKFLOWS: dict[str, Workflow] = {workflow.name: workflow for workflow in (INPAINT, HIRES)}
"""Name -> workflow, for all that requests may name."""
