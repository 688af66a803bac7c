"""The catalog: workflows by name."""

from __future__ import annotations

from core.graph.workflow import Workflow
from core.graph.workflows.class_conditional import CLASS_CONDITIONAL
from core.graph.workflows.hires import HIRES
from core.graph.workflows.inpaint import INPAINT
from core.graph.workflows.refined import REFINED

WORKFLOWS: dict[str, Workflow] = {workflow.name: workflow for workflow in (INPAINT, HIRES, CLASS_CONDITIONAL, REFINED)}
"""Name -> workflow, for all that requests may name. Of several that take what a request gives, the first serves it."""
