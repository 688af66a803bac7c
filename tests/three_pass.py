"""three_pass: as hires in three passes. It is all that a new workflow takes, besides a line in the catalog."""

from core.graph.op import Port
from core.graph.workflow import Edge, Node, Region, Workflow
from core.graph.workflows.inpaint import DECODE, DENOISE, PICTURE, PREVIEW


def _pass(name: str, before: str) -> tuple[Node, ...]:
    """A pass at a smaller canvas. before: the pass whose latents it starts from; "": none."""
    literals = {"canvas": name}
    start = (Edge(f"{name}_upscale", "latents", port="start"),) if before else ()
    sources = {"image_encode": f"{name}_encode", "text_encode": "text_encode"}
    inputs = tuple(
        Edge(sources[edge.source], edge.name, carried=f"{name}_denoise" if edge.carried else "")
        for edge in DENOISE.inputs
    )
    upscale = Node(f"{name}_upscale", "upscale", (Edge(f"{before}_denoise", "latents"),), literals=literals)
    return (
        *((upscale,) if before else ()),
        Node(f"{name}_encode", "image_encode", start, literals=literals),
        Node(f"{name}_denoise", "denoise", inputs, region=f"{name}_denoise", literals=literals),
    )


THREE_PASS = Workflow(
    name="three_pass",
    nodes=(
        Node("text_encode", "text_encode"),
        *_pass("small", ""),
        *_pass("middle", "small"),
        Node("upscale", "upscale", (Edge("middle_denoise", "latents"),)),
        Node("image_encode", "image_encode", (Edge("upscale", "latents", port="start"),)),
        DENOISE,
        PREVIEW,
        DECODE,
    ),
    outputs={"picture": "decode"},
    regions=(
        Region("small_denoise"),
        Region("middle_denoise", strength="hires_strength"),
        Region("denoise", strength=0.5),
    ),
    inputs=(Port("prompt", "text"), *PICTURE, Port("hires_scale", "number")),
    canvases={"small": "hires_scale", "middle": 1.5},
)
