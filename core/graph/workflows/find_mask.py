"""find_mask: the mask of a picture alone."""

from core.graph.op import Port
from core.graph.selecting import SEARCH, SEGMENT
from core.graph.workflow import Workflow

FIND_MASK = Workflow(
    name="find_mask",
    nodes=(SEGMENT,),
    outputs={"mask": SEGMENT.name},
    inputs=(Port("template", "picture"), SEARCH),
)
