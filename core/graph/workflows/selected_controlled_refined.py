"""selected_controlled_refined: as controlled_refined, under a mask that a segmenter finds."""

from core.graph.selecting import selecting
from core.graph.workflows.controlled_refined import CONTROLLED_REFINED

SELECTED_CONTROLLED_REFINED = selecting(CONTROLLED_REFINED)
