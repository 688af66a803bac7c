"""selected_inpaint: as inpaint, under a mask that a segmenter finds."""

from core.graph.selecting import selecting
from core.graph.workflows.inpaint import INPAINT

SELECTED_INPAINT = selecting(INPAINT)
