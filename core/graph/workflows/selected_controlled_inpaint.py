"""selected_controlled_inpaint: as controlled_inpaint, under a mask that a segmenter finds."""

from core.graph.selecting import selecting
from core.graph.workflows.controlled_inpaint import CONTROLLED_INPAINT

SELECTED_CONTROLLED_INPAINT = selecting(CONTROLLED_INPAINT)
