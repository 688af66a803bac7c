"""A workflow that cannot run is refused before anything of it runs, with node and input named."""

from __future__ import annotations

from dataclasses import replace

import pytest

import core.scheduling.ops  # noqa: F401  registers the ops
from core.errors import WorkflowError
from core.graph.catalog import WORKFLOWS
from core.graph.check import check_workflow
from core.graph.workflow import Edge, Node, Workflow
from core.graph.workflows.inpaint import INPAINT


@pytest.mark.parametrize("workflow", WORKFLOWS.values(), ids=lambda workflow: workflow.name)
def test_workflows_in_the_catalog_are_sound(workflow: Workflow) -> None:
    check_workflow(workflow)


def inpaint_with(name: str, **changes: object) -> Workflow:
    nodes = tuple(replace(node, **changes) if node.name == name else node for node in INPAINT.nodes)  # type: ignore[arg-type]
    return replace(INPAINT, nodes=nodes)


def inpaint_and(*nodes: Node, **changes: object) -> Workflow:
    return replace(INPAINT, nodes=(*INPAINT.nodes, *nodes), **changes)  # type: ignore[arg-type]


LATENTS = Edge("denoise", "latents")
DENOISE_INPUTS = INPAINT.node("denoise").inputs
UNCARRIED = tuple(replace(edge, carried="") for edge in DENOISE_INPUTS)

WRONG = {
    "unknown op": (inpaint_with("text_encode", op="dream"), "there is no op dream", "text_encode", ""),
    "unknown source": (
        inpaint_with("decode", inputs=(Edge("dream", "latents"),)),
        "no node dream",
        "decode",
        "latents",
    ),
    "wrong type": (
        inpaint_with("decode", inputs=(Edge("text_encode", "prompt_embeds", port="latents"),)),
        "takes latents, and text_encode.prompt_embeds is text embeddings",
        "decode",
        "latents",
    ),
    "no such value": (
        inpaint_with("decode", inputs=(Edge("denoise", "x", port="latents"),)),
        "denoise makes no x",
        "decode",
        "latents",
    ),
    "no such input": (
        inpaint_with("decode", inputs=(LATENTS, Edge("denoise", "clean"))),
        "decode has no input clean",
        "decode",
        "clean",
    ),
    "twice": (inpaint_with("decode", inputs=(LATENTS, LATENTS)), "more than once", "decode", "latents"),
    "unconnected": (inpaint_with("decode", inputs=()), "its input latents is not connected", "decode", "latents"),
    "carries nothing": (inpaint_with("denoise", inputs=UNCARRIED), "carries nothing", "denoise", ""),
    "unknown region": (replace(INPAINT, regions=()), "there is no region denoise", "denoise", ""),
    "carried from outside": (
        inpaint_with(
            "denoise", inputs=tuple(replace(e, carried="image_encode" if e.carried else "") for e in DENOISE_INPUTS)
        ),
        "no node of its region",
        "denoise",
        "latents",
    ),
    "cycle": (
        inpaint_with("image_encode", inputs=(Edge("denoise", "latents", port="start"),)),
        "a cycle: ",
        "image_encode",
        "start",
    ),
    "not in order": (replace(INPAINT, nodes=INPAINT.nodes[::-1]), "list the node after denoise", "decode", "latents"),
    "repeated output": (replace(INPAINT, outputs={"picture": "denoise"}), "an output must run once", "denoise", ""),
    "no output": (replace(INPAINT, outputs={"picture": "dream"}), "there is no node dream", "dream", ""),
    "side that shows nothing": (inpaint_with("preview", shows="image_encode"), "a node that repeats", "preview", ""),
    "reads a side node": (
        inpaint_and(Node("again", "image_encode", (Edge("preview", "latents", port="start"),))),
        "no node can read what a side node makes",
        "preview",
        "",
    ),
    "deferred step": (
        inpaint_with("decode", inputs=(replace(LATENTS, deferred=True),)),
        "may be repeated",
        "decode",
        "latents",
    ),
    "deferred optional value": (
        inpaint_and(
            Node(
                "again",
                "denoise",
                (*(e for e in UNCARRIED if e.name != "sampler"), Edge("image_encode", "sampler", deferred=True)),
            )
        ),
        "may make no sampler",
        "again",
        "sampler",
    ),
    "chooser with one reader": (inpaint_with("text_encode", chooses=True), "needs two readers", "text_encode", ""),
    "repeating chooser": (inpaint_with("denoise", chooses=True), "cannot choose", "denoise", ""),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    workflow, problem, node, name = WRONG[case]
    with pytest.raises(WorkflowError) as caught:
        check_workflow(workflow)
    assert problem in str(caught.value)
    assert (caught.value.node, caught.value.input) == (node, name)


def test_an_output_that_a_choice_skips_is_refused() -> None:
    workflow = Workflow(
        "w",
        (
            Node("check", "image_encode", chooses=True),
            Node("left", "image_encode", (Edge("check", "latents", port="start"),)),
            Node("right", "decode", (Edge("check", "latents"),)),
        ),
        {"picture": "right"},
    )
    with pytest.raises(WorkflowError, match="the output is skipped if check chooses left"):
        check_workflow(workflow)


def test_a_reader_cannot_begin_before_its_source_has_chosen() -> None:
    workflow = Workflow(
        "w",
        (
            Node("check", "image_encode", chooses=True),
            Node("left", "image_encode", (Edge("check", "latents", port="start", deferred=True),)),
            Node("right", "decode", (Edge("check", "latents"),)),
        ),
        {"picture": "right"},
    )
    with pytest.raises(WorkflowError, match="none can begin before"):
        check_workflow(workflow)
