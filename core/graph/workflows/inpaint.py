"""inpaint: masked editing, or a picture of a prompt, in one denoising loop."""

from core.graph.op import Port
from core.graph.workflow import Edge, Node, Region, Workflow

DENOISE = Node(
    "denoise",
    "denoise",
    inputs=(
        Edge("text_encode", "prompt_embeds"),
        Edge("text_encode", "text_lengths"),
        Edge("text_encode", "pooled_prompt_embeds"),
        Edge("image_encode", "latents", carried="denoise"),
        Edge("image_encode", "sampler", carried="denoise"),
        Edge("image_encode", "condition"),
        Edge("image_encode", "outside"),
        Edge("image_encode", "sigmas"),
    ),
    region="denoise",
)
PREVIEW = Node("preview", "decode", inputs=(Edge("denoise", "clean", port="latents"),), shows="denoise")
DECODE = Node("decode", "decode", inputs=(Edge("denoise", "latents"),))
PICTURE = (Port("template", "picture", is_optional=True), Port("mask", "mask", is_optional=True))

INPAINT = Workflow(
    name="inpaint",
    nodes=(Node("text_encode", "text_encode"), Node("image_encode", "image_encode"), DENOISE, PREVIEW, DECODE),
    outputs={"picture": "decode"},
    regions=(Region("denoise"),),
    inputs=(Port("prompt", "text"), *PICTURE),
    is_mask_aware=True,
)
