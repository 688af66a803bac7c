"""Workflows of the families' models: their graphs are the shipped ones, and what cannot run is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import core.scheduling.ops  # noqa: F401  the check of a workflow looks ops up
from core.errors import WorkflowError
from core.graph.catalog import CONTROLLED
from core.graph.check import check_workflow
from core.graph.controlling import CONTROLS
from core.graph.form import text
from core.graph.op import Port
from core.graph.workflow import Node, Region
from core.graph.workflow import Workflow as Graph
from core.graph.workflows.hires import HIRES
from core.graph.workflows.inpaint import INPAINT
from core.graph.workflows.refined import REFINED
from entrypoints.workflows import Image, Model, Workflow, choose, steps
from entrypoints.workflows.compiler import compile_workflow
from entrypoints.workflows.families import (
    VAE,
    ControlNet,
    Denoiser,
    LatentsGenerator,
    LoRA,
    TextEncoder,
    Upscaler,
    denoise,
)
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

OF_HIRES = NAMES | {
    "latents_generator": "first_encode",
    "control_encode": "first_control_encode",
    "control_net": "first_controlnet",
    "denoiser": "first_denoise",
    "loop": "first_denoise",
    "upscaler": "upscale",
    "latents_generator_2": "image_encode",
    "control_encode_2": "control_encode",
    "control_net_2": "controlnet",
    "denoiser_2": "denoise",
    "loop_2": "denoise",
    "hires_scale": "first",
}
"""Likewise, and the canvas."""

OF_REFINED = NAMES | {
    "text_encoder_2": "refiner_text_encode",
    "latents_generator_2": "refiner_image_encode",
    "denoiser_2": "refine",
    "loop_2": "refine",
}


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    edges = [
        replace(edge, source=names[edge.source], carried=names[edge.carried], port=edge.port.replace(edge.name, "", 1))
        for edge in node.inputs
    ]
    return replace(
        node,
        name=names[node.name],
        inputs=tuple(edges),
        region=names[node.region],
        shows=names[node.shows],
        literals={name: names[str(value)] for name, value in node.literals.items()},
    )


def is_graph(found: Graph, shipped: Graph, names: Mapping[str, str] = NAMES) -> bool:
    """Whether they are equal, but for names and the order of nodes and edges."""
    nodes = [renamed(node, names) for node in found.nodes]
    return (
        {node.name: replace(node, inputs=()) for node in nodes}
        == {node.name: replace(node, inputs=()) for node in shipped.nodes}
        and {node.name: set(node.inputs) for node in nodes} == {node.name: set(node.inputs) for node in shipped.nodes}
        and {name: names[node] for name, node in found.outputs.items()} == shipped.outputs
        and tuple(replace(region, name=names[region.name]) for region in found.regions) == shipped.regions
        and {names[name]: factor for name, factor in found.canvases.items()} == shipped.canvases
        and found.is_mask_aware == shipped.is_mask_aware
    )


def test_figure_7_is_the_shipped_graph() -> None:
    registered = read_workflows([EXAMPLES / "figure7.py"])
    (graph,) = registered.workflows
    assert is_graph(graph, CONTROLLED[INPAINT])
    assert graph.inputs == (Port("prompt", "text"), CONTROLS)
    assert graph.loras == {"style": 1.0}
    assert registered.classes == ()


def example(name: str) -> Graph:
    (graph,) = read_workflows([EXAMPLES / f"{name}.py"]).workflows
    return graph


def test_two_passes_are_the_shipped_graph() -> None:
    graph = example("hires")
    assert is_graph(graph, HIRES, OF_HIRES)
    assert set(graph.inputs) == set(HIRES.inputs)


def test_a_refining_pass_is_the_shipped_graph() -> None:
    graph = example("two_loras_refined")
    assert is_graph(graph, REFINED, OF_REFINED)
    assert set(graph.inputs) == set(REFINED.inputs)
    assert graph.loras == {"style": 0.8, "subject": 0.5}


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

    def number_input(self, name: str, *, required: bool = True) -> Any:
        return self.workflow.add_input(name, float, required=required)

    def begin(self) -> tuple[Any, Any]:
        return self.generator(self.seed, self.image, self.mask), self.encoder(self.prompt)

    def picture(self, patches: Sequence[Model] = ()) -> Any:
        latents, prompt_embeds = self.begin()
        for patch in patches:
            self.denoiser.add_patch(patch)
        return self.vae(self.denoised(latents, prompt_embeds))

    def denoised(self, latents: Any, prompt_embeds: Any, added: Any = None, denoiser: Model | None = None) -> Any:
        """After a loop of steps. added: makes what is added to a step of its latents."""
        for _ in steps(self.number):
            residuals = None if added is None else added(latents)
            latents = denoise((denoiser or self.denoiser)(latents, prompt_embeds, residuals), latents)
        return latents

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


def test_a_patch_that_is_removed_is_none() -> None:
    written = Written(prompt="words")
    patches = [LoRA("a"), LoRA("b", 0.5)]
    for patch in patches:
        written.denoiser.add_patch(patch)
    written.denoiser.rm_patch(patches[0])
    written.workflow.add_output(written.picture(), name="picture")
    assert written.graph().loras == {"b": 0.5}


def test_two_passes_beside_controlnets_are_the_shipped_graph() -> None:
    w = Written()
    scale, control = w.number_input("scale"), w.workflow.add_input("control", Image)
    prompt_embeds, net = w.encoder(w.prompt), ControlNet()
    seen = w.vae(image=control, scale=scale, mode="encode")
    latents = w.generator(w.seed, w.image, w.mask, scale=scale)
    latents = w.denoised(latents, prompt_embeds, lambda latents: net(latents, prompt_embeds, seen))
    seen = w.vae(image=control, mode="encode")
    latents = w.generator(w.seed, w.image, w.mask, latents=Upscaler()(latents))
    latents = w.denoised(latents, prompt_embeds, lambda latents: net(latents, prompt_embeds, seen))
    w.workflow.add_output(w.vae(latents), name="picture")
    assert is_graph(w.graph(), CONTROLLED[HIRES], OF_HIRES)


def test_a_second_pass_and_a_refiner() -> None:
    """The refiner goes on with the second pass, of which previews show the part before it."""
    w = Written()
    scale, share, prompt_embeds = w.number_input("scale"), w.number_input("share"), w.encoder(w.prompt)
    latents = w.denoised(w.generator(w.seed, scale=scale), prompt_embeds)
    latents = w.denoised(w.generator(w.seed, latents=Upscaler()(latents), denoising_end=share), prompt_embeds)
    begin = LatentsGenerator(role="refiner")(w.seed, latents=latents, denoising_start=share)
    refined = w.denoised(begin, TextEncoder(role="refiner")(w.prompt), denoiser=Denoiser(role="refiner"))
    w.workflow.add_output(w.vae(refined), name="picture")
    graph = w.graph()
    assert graph.regions == (
        Region("loop"),
        Region("loop_2", "hires_strength", end="refiner_start"),
        Region("loop_3", "hires_strength", begin="refiner_start"),
    )
    assert [side.shows for side in graph.side_nodes] == ["denoiser_2"]


def test_strengths_are_fields_of_requests() -> None:
    w = Written()
    first, second, prompt_embeds = w.number_input("first"), w.number_input("second"), w.encoder(w.prompt)
    latents = w.denoised(w.generator(w.seed, strength=first), prompt_embeds)
    again = w.generator(w.seed, latents=latents, strength=second)
    w.workflow.add_output(w.vae(w.denoised(again, prompt_embeds)), name="picture")
    assert w.graph().regions == (Region("loop"), Region("loop_2", "hires_strength"))


def test_a_class_reads_the_prompt_and_the_picture() -> None:
    written = Written()
    picture = written.picture()
    written.workflow.add_output(picture, name="picture")
    written.workflow.add_output(Reader()(picture, written.prompt).number, name="number")
    graph = written.graph()
    assert graph.inputs == (Port.of("prompt", text(4096)), *INPAINT.inputs[1:])
    assert (graph.outputs, graph.output_ports) == ({"picture": "vae", "number": "reader"}, {"number": "number"})


class Paint(Reader):
    """A class that makes a picture of one."""

    def setup_io(self) -> None:
        self.add_input("image", Image)
        self.add_input("words", str, required=False)
        self.add_output("picture", Image)
        self.add_output("verdict", str)


def test_previews_pass_the_classes_that_the_picture_passes() -> None:
    (graph,) = read_workflows([EXAMPLES / "guarded.py"]).workflows
    assert [node.name for node in graph.side_nodes] == ["vae_preview", "safety_preview"]
    w = Written()
    first = Paint()(w.picture(), w.prompt)
    w.workflow.add_output(Paint()(first.picture, first.verdict).picture, name="picture")
    graph = w.graph()
    assert [(node.name, [edge.source for edge in node.inputs]) for node in graph.side_nodes] == [
        ("vae_preview", ["denoiser"]),
        ("paint_preview", ["vae_preview"]),
        ("paint_2_preview", ["paint_preview", "paint_preview"]),
    ]
    assert graph.node("paint_preview").given == {"words": "prompt"}


def branching(w: Written) -> Any:
    picture = w.picture()
    painted = Paint()(picture)
    return choose(painted.verdict, dark=lambda: Paint()(picture).picture, fine=lambda: painted.picture)


def repeating(w: Written) -> Any:
    picture = w.picture()
    for _ in steps(3):
        picture = Paint()(picture).picture
    return picture


def of_two_decodings(w: Written) -> Any:
    first = w.picture()
    w.denoiser = Denoiser()
    return Paint()(first, Paint()(w.picture()).verdict).picture


@pytest.mark.parametrize("write", [branching, repeating, of_two_decodings])
def test_without_previews_where_these_cannot_pass_all_classes(write: Callable[[Written], Any]) -> None:
    w = Written()
    w.workflow.add_output(write(w), name="picture")
    graph = w.graph()
    assert graph.last_between is not None
    assert not graph.side_nodes


class Framed(Paint):
    """A class with an input that ops have as a literal."""

    def setup_io(self) -> None:
        super().setup_io()
        self.add_input("canvas", str)


def test_a_literal_of_a_class_is_no_canvas() -> None:
    w = Written()
    w.workflow.add_output(Framed()(w.picture(), canvas="oak").picture, name="picture")
    graph = w.graph()
    assert not graph.canvases
    assert {node.canvas for node in graph.nodes} == {""}


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


def latents_of_a_loop(w: Written) -> None:
    latents, prompt_embeds = w.begin()
    w.denoised(w.denoised(latents, prompt_embeds), prompt_embeds)


def enlarged_latents(w: Written) -> None:
    prompt_embeds = w.encoder(w.prompt)
    latents = w.denoised(w.generator(w.seed, scale=w.number_input("scale")), prompt_embeds)
    w.denoised(Upscaler()(latents), prompt_embeds)


def small_latents(w: Written) -> Any:
    return w.denoised(w.generator(w.seed, scale=w.number_input("scale")), w.encoder(w.prompt))


def small_picture(w: Written) -> None:
    w.vae(small_latents(w))


def small_start(w: Written) -> None:
    w.generator(w.seed, latents=small_latents(w))


def scaled_latents(w: Written) -> None:
    w.generator(w.seed, latents=Upscaler()(small_latents(w)), scale=w.number_input("other"))


def two_scales(w: Written) -> None:
    small_latents(w)
    w.generator(w.seed, scale=w.number_input("other"))


def large_latents(w: Written) -> None:
    latents, prompt_embeds = w.begin()
    Upscaler()(w.denoised(latents, prompt_embeds))


def other_canvas(w: Written) -> None:
    prompt_embeds, controls = w.encoder(w.prompt), w.vae(image=w.image, mode="encode")
    latents = w.generator(w.seed, scale=w.number_input("scale"))
    w.denoised(latents, prompt_embeds, lambda latents: ControlNet()(latents, prompt_embeds, controls))


def wrong_scale(w: Written) -> None:
    w.generator(w.seed, scale=9.0)


def wrong_strength(w: Written) -> None:
    w.generator(w.seed, strength=0.0)


def wrong_switch(w: Written) -> None:
    w.generator(w.seed, noise_first=1)


def seed_of_the_first_loop(w: Written) -> None:
    w.generator(5)


def seed_that_is_none(w: Written) -> None:
    latents, prompt_embeds = w.begin()
    for _ in steps(w.number):
        latents = denoise(w.denoiser(latents, prompt_embeds), latents)
    w.generator(-1, latents=latents)


def optional_scale(w: Written) -> None:
    w.generator(w.seed, scale=w.number_input("scale", required=False))


def scale_as_strength(w: Written) -> None:
    both = w.number_input("both")
    w.generator(w.seed, scale=both, strength=both)


def start_of_nothing(w: Written) -> None:
    w.generator(w.seed, denoising_start=w.number_input("share"))


def strength_of_the_rest(w: Written) -> None:
    latents, prompt_embeds = w.begin()
    latents = w.denoised(latents, prompt_embeds)
    w.generator(w.seed, latents=latents, denoising_start=w.number_input("share"), strength=w.number_input("other"))


def patched_refiner(w: Written) -> None:
    latents, prompt_embeds = w.begin()
    refiner = Denoiser(role="refiner")
    refiner.add_patch(LoRA("a"))
    w.denoised(latents, prompt_embeds, denoiser=refiner)


def patched_in_one_pass(w: Written) -> None:
    latents, prompt_embeds = w.begin()
    patch = LoRA("a")
    w.denoiser.add_patch(patch)
    latents = w.denoised(latents, prompt_embeds)
    w.denoiser.rm_patch(patch)
    w.vae(w.denoised(w.generator(w.seed, latents=latents), prompt_embeds))


def role_of_no_name(w: Written) -> None:
    Denoiser(role="the refiner")


def encoding_role(w: Written) -> None:
    VAE(role="refiner")(image=w.image, mode="encode")


def role_of_another_part(w: Written) -> None:
    w.encoder = TextEncoder(role="x")
    w.denoiser = Denoiser(role="x_text_encoder")
    w.workflow.add_output(w.picture(), name="picture")


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
    latents_of_a_loop: "node denoiser_2, input latents: a loop begins with what a LatentsGenerator makes",
    enlarged_latents: "node denoiser_2, input latents: a loop begins with what a LatentsGenerator makes",
    small_picture: "node vae, input latents: it is of a smaller picture; Upscaler",
    small_start: "node latents_generator_2, input latents: they are of a smaller picture; Upscaler",
    scaled_latents: "node latents_generator_2, input scale: the latents have a size already",
    two_scales: "node latents_generator_2, input other: two inputs of the workflow are the request's hires_scale",
    large_latents: "node upscaler, input latents: they are of the whole picture already",
    other_canvas: "node control_net, input ref_image: they have another size than the latents",
    wrong_scale: r"node latents_generator, input scale: it is 9.0; give a number from 1\.1 to 4",
    wrong_strength: "node latents_generator, input strength: it is 0.0; give a number above 0 and at most 1",
    wrong_switch: "node latents_generator, input noise_first: it is 1; give True, or leave it out",
    seed_of_the_first_loop: "node latents_generator, input seed: requests say the seed of a loop without latents",
    seed_that_is_none: "node latents_generator_2, input seed: it is -1; give a number from 0 to 9223372036854775807",
    optional_scale: "node latents_generator, input scale: each request gives its hires_scale",
    scale_as_strength: "input both: input both of the workflow is the request's hires_scale already",
    start_of_nothing: "node latents_generator, input latents: denoising_start is for latents to go on with",
    strength_of_the_rest: "node latents_generator_2, input strength: it is that of the steps before",
    patched_refiner: "node denoiser: adapters are of the served model, and another plays refiner",
    patched_in_one_pass: "another step has other adapters",
    role_of_no_name: "Denoiser, role: it is 'the refiner'; a role is a Python identifier",
    encoding_role: "VAE, role: control pictures are encoded by the served model's",
    role_of_another_part: "its role x_text_encoder is played by a transformer",
    unencoded_control: "node control_net, input ref_image: no request says it",
}


@pytest.mark.parametrize("write", REFUSED, ids=lambda write: write.__name__)
def test_what_cannot_run_is_refused_by_name(write: Any) -> None:
    written = Written()
    with pytest.raises(WorkflowError, match=REFUSED[write]):
        written.graph_of(write)
