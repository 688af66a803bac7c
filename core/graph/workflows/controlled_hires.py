"""controlled_hires: as hires, steered by ControlNets."""

from core.graph.controlling import controlled
from core.graph.workflows.hires import HIRES

CONTROLLED_HIRES = controlled(HIRES)
