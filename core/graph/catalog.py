"""The catalog: workflows by name."""

from __future__ import annotations

from core.graph.workflow import Workflow
from core.graph.workflows.class_conditional import CLASS_CONDITIONAL
from core.graph.workflows.find_mask import FIND_MASK
from core.graph.workflows.hires import HIRES
from core.graph.workflows.inpaint import INPAINT
from core.graph.workflows.refined import REFINED
from core.graph.workflows.selected_hires import SELECTED_HIRES
from core.graph.workflows.selected_inpaint import SELECTED_INPAINT
from core.graph.workflows.selected_refined import SELECTED_REFINED

NAMED = (INPAINT, HIRES, CLASS_CONDITIONAL, REFINED)
"""The workflows that a model may name for its requests."""

SELECTED = {INPAINT: SELECTED_INPAINT, HIRES: SELECTED_HIRES, REFINED: SELECTED_REFINED}
"""Workflow whose mask is given -> the same with a mask that is found."""

WORKFLOWS: dict[str, Workflow] = {workflow.name: workflow for workflow in (*NAMED, *SELECTED.values(), FIND_MASK)}
"""Name -> workflow, for all that engines run. Of several that take what a request gives, the first serves it."""
