"""The catalog: workflows by name."""

from __future__ import annotations

from core.graph.workflow import CLASS_CONDITIONAL, HIRES, INPAINT, Workflow

WORKFLOWS: dict[str, Workflow] = {workflow.name: workflow for workflow in (INPAINT, HIRES, CLASS_CONDITIONAL)}
"""Name -> workflow, for all that requests may name."""
