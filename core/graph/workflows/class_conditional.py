"""class_conditional: a picture of a class, without a prompt to encode: every step knows the class."""

from dataclasses import replace

from core.graph.op import Port
from core.graph.workflow import Node, Region, Workflow
from core.graph.workflows.inpaint import DECODE, DENOISE, PREVIEW

CLASS_CONDITIONAL = Workflow(
    name="class_conditional",
    nodes=(
        Node("image_encode", "image_encode"),
        replace(DENOISE, inputs=tuple(edge for edge in DENOISE.inputs if edge.source != "text_encode")),
        PREVIEW,
        DECODE,
    ),
    outputs={"picture": "decode"},
    regions=(Region("denoise"),),
    inputs=(Port("class_label", "class"),),
    is_mask_aware=True,
)
