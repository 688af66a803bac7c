"""selected_hires: as hires, under a mask that a segmenter finds."""

from core.graph.selecting import selecting
from core.graph.workflows.hires import HIRES

SELECTED_HIRES = selecting(HIRES)
