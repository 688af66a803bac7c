"""controlled_inpaint: as inpaint, steered by ControlNets."""

from core.graph.controlling import controlled
from core.graph.workflows.inpaint import INPAINT

CONTROLLED_INPAINT = controlled(INPAINT)
