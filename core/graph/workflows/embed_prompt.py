"""embed_prompt: one vector of a prompt, by which prompts are compared; no picture is made."""

from core.graph.op import Port
from core.graph.workflow import Edge, Node, Workflow

EMBED_PROMPT = Workflow(
    name="embed_prompt",
    nodes=(
        Node("text_encode", "text_encode"),
        Node("embed", "embed", inputs=(Edge("text_encode", "prompt_embeds"),)),
    ),
    outputs={"embedding": "embed"},
    inputs=(Port("prompt", "text"),),
)
