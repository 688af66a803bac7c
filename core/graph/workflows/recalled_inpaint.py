"""recalled_inpaint: as inpaint, from the state of an earlier request."""

from core.graph.recalling import recalling
from core.graph.workflows.inpaint import INPAINT

RECALLED_INPAINT = recalling(INPAINT)
