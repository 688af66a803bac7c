"""refined: as inpaint, with a second model, the refiner, for the last steps: those at the lowest noise levels.

The refiner goes on with the base model's latents. It has text, condition and sampler of its own, and encodes template
and mask, too, because what its denoiser sees of them is its own.
"""

from dataclasses import replace

from core.graph.op import Port
from core.graph.workflow import Edge, Node, Region, Workflow
from core.graph.workflows.inpaint import DENOISE, PICTURE, PREVIEW


def _of_refiner(edge: Edge) -> Edge:
    """The refiner's edge that corresponds to one of the base model."""
    if edge.name == "latents":
        return replace(edge, source="denoise", carried="refine")
    source = "refiner_text_encode" if edge.source == "text_encode" else "refiner_image_encode"
    return replace(edge, source=source, carried="refine" if edge.carried else "")


REFINED = Workflow(
    name="refined",
    nodes=(
        Node("text_encode", "text_encode"),
        Node("image_encode", "image_encode"),
        DENOISE,
        Node("refiner_text_encode", "text_encode", role="refiner_text_encoder"),
        Node("refiner_image_encode", "image_encode", role="refiner_vae"),
        Node(
            "refine",
            "denoise",
            inputs=tuple(_of_refiner(edge) for edge in DENOISE.inputs),
            role="refiner",
            region="refine",
        ),
        PREVIEW,
        Node("decode", "decode", inputs=(Edge("refine", "latents"),)),
    ),
    outputs={"picture": "decode"},
    regions=(Region("denoise", end="refiner_start"), Region("refine", begin="refiner_start")),
    inputs=(Port("prompt", "text"), *PICTURE, Port("refiner_start", "number")),
)
