"""selected_refined: as refined, under a mask that a segmenter finds."""

from core.graph.selecting import selecting
from core.graph.workflows.refined import REFINED

SELECTED_REFINED = selecting(REFINED)
