"""Workflows of the families' models: their graphs are the shipped ones, and what cannot run is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import core.scheduling.ops  # noqa: F401  the check of a workflow looks ops up
from core.errors import WorkflowError
from core.graph.check import check_workflow
from core.graph.controlling import CONTROLS
from core.graph.form import text
from core.graph.op import Port
from core.graph.workflow import Node
from core.graph.workflow import Workflow as Graph
from core.graph.workflows.controlled_inpaint import CONTROLLED_INPAINT
from core.graph.workflows.inpaint import INPAINT
from entrypoints.workflows import Image, Model, Workflow, steps
from entrypoints.workflows.compiler import compile_workflow
from entrypoints.workflows.families import VAE, ControlNet, Denoiser, LatentsGenerator, LoRA, TextEncoder, denoise
from entrypoints.workflows.workflow_files import read_workflows

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "workflows"
NAMES = {
    "text_encoder": "text_encode",
    "latents_generator": "image_encode",
    "control_encode": "control_encode",
    "control_net": "controlnet",
    "denoiser": "denoise",
    "vae": "decode",
    "vae_preview": "preview",
    "loop": "denoise",
    "": "",
}
"""Node or region in the language -> in the shipped graphs."""


def renamed(node: Node) -> Node:
    edges = [
        replace(edge, source=NAMES[edge.source], carried=NAMES[edge.carried], port=edge.port.replace(edge.name, "", 1))
        for edge in node.inputs
    ]
    return replace(node, name=NAMES[node.name], inputs=tuple(edges), region=NAMES[node.region], shows=NAMES[node.shows])


def is_graph(found: Graph, shipped: Graph) -> bool:
    """Whether they are equal, but for the order of nodes and edges."""
    mine = {node.name: replace(node, inputs=()) for node in map(renamed, found.nodes)}
    edges = {node.name: set(node.inputs) for node in map(renamed, found.nodes)}
    return (
        mine == {node.name: replace(node, inputs=()) for node in shipped.nodes}
        and edges == {node.name: set(node.inputs) for node in shipped.nodes}
        and {name: NAMES[node] for name, node in found.outputs.items()} == shipped.outputs
        and found.is_mask_aware
    )


def test_figure_7_is_the_shipped_graph() -> None:
    registered = read_workflows([EXAMPLES / "figure7.py"])
    (graph,) = registered.workflows
    assert is_graph(graph, CONTROLLED_INPAINT)
    assert graph.inputs == (Port("prompt", "text"), CONTROLS)
    assert graph.loras == {"style": 1.0}
    assert registered.classes == ()


class Reader(Model):
    """A class of a user's own."""

    def setup_io(self) -> None:
        self.add_input("image", Image, required=False)
        self.add_input("words", str, required=False)
        self.add_input("number", int, required=False)
        self.add_output("number", int)
        self.add_output("words", str)

    def load(self, device: str, dtype: Any) -> None:
        """It has no weights."""

    def execute(self, **inputs: object) -> dict[str, object]:
        return {"number": 1, "words": ""}


class Written:
    """The inputs and models of a workflow."""

    def __init__(self, prompt: str = "prompt") -> None:
        self.workflow = Workflow(name="written")
        add = self.workflow.add_input
        self.seed, self.number, self.prompt = add("seed", int), add("number", int), add(prompt, str)
        self.image, self.mask = (add(name, Image, required=False) for name in ("image", "mask"))
        self.generator, self.encoder, self.denoiser, self.vae = LatentsGenerator(), TextEncoder(), Denoiser(), VAE()

    def begin(self) -> tuple[Any, Any]:
        return self.generator(self.seed, self.image, self.mask), self.encoder(self.prompt)

    def picture(self, patches: Sequence[Model] = ()) -> Any:
        latents, prompt_embeds = self.begin()
        for patch in patches:
            self.denoiser.add_patch(patch)
        for _ in steps(self.number):
            latents = denoise(self.denoiser(latents, prompt_embeds), latents)
        return self.vae(latents)

    def graph_of(self, write: Callable[[Written], None]) -> Graph:
        """Raises WorkflowError."""
        write(self)
        return self.graph()

    def graph(self) -> Graph:
        """Raises WorkflowError."""
        (graph,) = compile_workflow(self.workflow).workflows
        check_workflow(graph)
        return graph


def test_an_edit_is_the_shipped_graph() -> None:
    written = Written(prompt="words")
    written.workflow.add_output(written.picture([LoRA("a"), LoRA("b", 0.5)]), name="picture")
    graph = written.graph()
    assert is_graph(graph, INPAINT)
    assert graph.inputs == INPAINT.inputs
    assert graph.loras == {"a": 1.0, "b": 0.5}


def test_a_class_reads_the_prompt_and_the_picture() -> None:
    written = Written()
    picture = written.picture()
    written.workflow.add_output(picture, name="picture")
    written.workflow.add_output(Reader()(picture, written.prompt).number, name="number")
    graph = written.graph()
    assert graph.inputs == (Port.of("prompt", text(4096)), *INPAINT.inputs[1:])
    assert (graph.outputs, graph.output_ports) == ({"picture": "vae", "number": "reader"}, {"number": "number"})


def literal_prompt(w: Written) -> None:
    w.encoder("a hat")


def prompt_of_a_class(w: Written) -> None:
    w.encoder(Reader()(words=w.prompt).words)


def seed_for_a_class(w: Written) -> None:
    w.workflow.add_output(w.picture(), name="picture")
    w.workflow.add_output(Reader()(number=w.seed).number, name="number")


def seed_for_the_steps(w: Written) -> None:
    w.number = w.image
    w.workflow.add_output(w.picture(), name="picture")


def two_prompts(w: Written) -> None:
    w.encoder(w.prompt)
    w.encoder(w.workflow.add_input("other", str))


def two_seeds(w: Written) -> None:
    w.generator(w.seed)
    w.generator(w.workflow.add_input("other", int))


def seed_as_number(w: Written) -> None:
    w.number = w.seed
    w.picture()


def number_of_both(w: Written) -> None:
    w.workflow.add_output(w.picture(), name="picture")
    count = w.number
    for _ in steps(w.number):
        count = Reader()(number=count).number
    w.workflow.add_output(count, name="number")


def image_as_prompt(w: Written) -> None:
    w.encoder(w.image)


def image_as_latents(w: Written) -> None:
    w.vae(w.image)


def latents_without_steps(w: Written) -> None:
    latents, _ = w.begin()
    w.workflow.add_output(w.vae(latents), name="picture")


def no_loop(w: Written) -> None:
    w.denoiser(*w.begin())


def nothing_carried(w: Written) -> None:
    latents, prompt_embeds = w.begin()
    for _ in steps(w.number):
        step = denoise(w.denoiser(latents, prompt_embeds), latents)
    w.vae(step)


def counted_steps(w: Written) -> None:
    w.number = 4
    w.picture()


def class_between_steps(w: Written) -> None:
    latents, prompt_embeds = w.begin()
    number = w.number
    for _ in steps(w.number):
        latents = denoise(w.denoiser(latents, prompt_embeds), latents)
        number = Reader()(number=number).number


def encoder_in_the_loop(w: Written) -> None:
    latents, prompt_embeds = w.begin()
    for _ in steps(w.number):
        latents = denoise(w.denoiser(latents, prompt_embeds), latents)
        w.encoder(w.prompt)


def latents_for_a_class(w: Written) -> None:
    latents, _ = w.begin()
    Reader()(latents)
    w.workflow.add_output(w.picture(), name="picture")


def other_latents(w: Written) -> None:
    latents, prompt_embeds = w.begin()
    for _ in steps(w.number):
        latents = denoise(w.denoiser(latents, prompt_embeds), prompt_embeds)


def denoised_twice(w: Written) -> None:
    latents, prompt_embeds = w.begin()
    for _ in steps(w.number):
        noise_pred = w.denoiser(latents, prompt_embeds)
        latents = denoise(denoise(noise_pred, latents), latents)  # type: ignore[arg-type]


def prediction_for_a_class(w: Written) -> None:
    latents, prompt_embeds = w.begin()
    for _ in steps(w.number):
        Reader()(w.denoiser(latents, prompt_embeds))


def patched_vae(w: Written) -> None:
    w.vae.add_patch(LoRA("a"))
    w.picture()


def patch_that_is_none(w: Written) -> None:
    w.picture([Reader()])


def same_patch_twice(w: Written) -> None:
    w.picture([LoRA("a"), LoRA("a", 0.5)])


def other_patches(w: Written) -> None:
    w.picture([LoRA("a")])
    w.denoiser = Denoiser()
    w.picture()


def lora_as_a_node(w: Written) -> None:
    LoRA("a")()


def unknown_mode(w: Written) -> None:
    w.vae(w.begin()[0], mode="both")


def unencoded_control(w: Written) -> None:
    latents, prompt_embeds = w.begin()
    for _ in steps(w.number):
        added = ControlNet()(latents, prompt_embeds, w.image)
        latents = denoise(w.denoiser(latents, prompt_embeds, added), latents)


REFUSED = {
    literal_prompt: "node text_encoder, input prompt: it is a literal",
    prompt_of_a_class: "node text_encoder, input prompt: the request says it",
    seed_for_a_class: "input seed: classes read no field of requests but the prompt",
    seed_for_the_steps: r"steps\(input image\): a number, or an int",
    two_prompts: "node text_encoder_2, input other: two inputs of the workflow are the request's prompt",
    two_seeds: "node latents_generator_2, input other: two inputs of the workflow are the request's seed",
    seed_as_number: "node denoiser, input seed: input seed of the workflow is the request's seed already",
    number_of_both: "input number: classes read no field of requests but the prompt",
    image_as_prompt: "node text_encoder, input prompt: it takes text",
    image_as_latents: "node vae, input latents: no request says it",
    latents_without_steps: "node latents_generator: it begins no region",
    no_loop: r"node denoiser: call it in `for step in steps\(n\)`",
    nothing_carried: "node denoiser, input latents: each round needs what the one before has made",
    counted_steps: r"node denoiser: steps\(4\): requests say how many",
    class_between_steps: "node reader: it is in a loop of denoiser",
    encoder_in_the_loop: "node text_encoder_2: call it before or after a loop",
    latents_for_a_class: "node reader, input image: it takes picture, and latents_generator.latents is latents",
    other_latents: "denoise, latents: the noise was predicted for others",
    denoised_twice: "denoise, noise_pred: it is a Value",
    prediction_for_a_class: "node reader, input image: it is a NoisePrediction",
    patched_vae: "node vae: it takes no patches",
    patch_that_is_none: "node denoiser: each of its patches is another LoRA",
    same_patch_twice: "node denoiser: each of its patches is another LoRA",
    other_patches: "another step has other adapters",
    lora_as_a_node: "it has no outputs",
    unknown_mode: "VAE, mode: it is 'both'",
    unencoded_control: "node control_net, input ref_image: no request says it",
}


@pytest.mark.parametrize("write", REFUSED, ids=lambda write: write.__name__)
def test_what_cannot_run_is_refused_by_name(write: Any) -> None:
    written = Written()
    with pytest.raises(WorkflowError, match=REFUSED[write]):
        written.graph_of(write)
