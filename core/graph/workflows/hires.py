"""hires: as inpaint in two passes, first a smaller picture, whose upscaled latents the second pass starts from."""

from dataclasses import replace

from core.graph.op import Port
from core.graph.workflow import Edge, Node, Region, Workflow
from core.graph.workflows.inpaint import DECODE, DENOISE, PICTURE, PREVIEW

FIRST = {"canvas": "first"}


def _of_first(edge: Edge) -> Edge:
    """The edge of the first pass that corresponds to one of the second."""
    source = "first_encode" if edge.source == "image_encode" else edge.source
    return replace(edge, source=source, carried="first_denoise" if edge.carried else "")


HIRES = Workflow(
    name="hires",
    nodes=(
        Node("text_encode", "text_encode"),
        Node("first_encode", "image_encode", literals=FIRST),
        Node(
            "first_denoise",
            "denoise",
            inputs=tuple(_of_first(edge) for edge in DENOISE.inputs),
            region="first_denoise",
            literals=FIRST,
        ),
        Node("upscale", "upscale", inputs=(Edge("first_denoise", "latents"),)),
        Node("image_encode", "image_encode", inputs=(Edge("upscale", "latents", port="start"),)),
        DENOISE,
        PREVIEW,
        DECODE,
    ),
    outputs={"picture": "decode"},
    regions=(Region("first_denoise"), Region("denoise", strength="hires_strength")),
    inputs=(Port("prompt", "text"), *PICTURE, Port("hires_scale", "number")),
    canvases={"first": "hires_scale"},
)
