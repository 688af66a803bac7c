"""selected_controlled_hires: as controlled_hires, under a mask that a segmenter finds."""

from core.graph.selecting import selecting
from core.graph.workflows.controlled_hires import CONTROLLED_HIRES

SELECTED_CONTROLLED_HIRES = selecting(CONTROLLED_HIRES)
