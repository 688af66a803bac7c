"""controlled_refined: as refined, steered by ControlNets."""

from core.graph.controlling import controlled
from core.graph.workflows.refined import REFINED

CONTROLLED_REFINED = controlled(REFINED)
