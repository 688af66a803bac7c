"""A workflow that cannot run is refused before anything of it runs, with node and input named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hostile_graphs import hostile_ops

import core.scheduling.ops  # noqa: F401  registers the ops
from core.errors import WorkflowError
from core.graph.catalog import WORKFLOWS
from core.graph.check import check_workflow
from core.graph.workflow import Edge, Node, Region, Workflow
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
    "begins nothing": (
        inpaint_and(Node("again", "image_encode")),
        "it begins no region",
        "again",
        "",
    ),
    "makes a result for nobody": (
        inpaint_and(Node("again", "decode", inputs=(LATENTS,))),
        "its result reaches nobody",
        "again",
        "",
    ),
    "two outputs of one node": (
        replace(INPAINT, outputs={"picture": "decode", "film": "decode"}),
        "two outputs are of one node",
        "",
        "",
    ),
    "unknown literal": (inpaint_with("decode", literals={"size": 3}), "takes no literal size", "decode", ""),
    "no seed": (inpaint_with("image_encode", literals={"seed": -1}), "cannot be -1, of type int", "image_encode", ""),
    "no switch": (
        inpaint_with("image_encode", literals={"noise_first": 1}),
        "cannot be 1, of type bool",
        "image_encode",
        "",
    ),
    "unknown canvas": (inpaint_with("image_encode", literals={"canvas": "big"}), "no canvas big", "image_encode", ""),
    "repeated output": (replace(INPAINT, outputs={"picture": "denoise"}), "an output must run once", "denoise", ""),
    "no output": (replace(INPAINT, outputs={"picture": "dream"}), "there is no node dream", "dream", ""),
    "side that shows nothing": (inpaint_with("preview", shows="image_encode"), "a node that repeats", "preview", ""),
    "reads a side node": (
        inpaint_and(Node("again", "image_encode", (Edge("preview", "latents", port="start"),))),
        "side nodes that show denoise can read alone",
        "again",
        "start",
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
    "node without a name": (inpaint_and(Node("", "image_encode")), "a node has no name", "", ""),
    "region without a name": (
        replace(INPAINT, regions=(*INPAINT.regions, Region(""))),
        "a region has no name",
        "",
        "",
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


def wide(name: str, *sources: str, **fields: bool) -> Node:
    return Node(name, "wide", tuple(Edge(source, "x", f"in{port}") for port, source in enumerate(sources)), **fields)


def test_an_output_that_needs_both_branches_of_a_choice_is_refused() -> None:
    check, left, right = wide("check", chooses=True), wide("left", "check"), wide("right", "check")
    with hostile_ops(), pytest.raises(WorkflowError, match="node end: the output is never made"):
        check_workflow(Workflow("w", (check, left, right, wide("end", "left", "right")), outputs={"picture": "end"}))


def test_an_output_that_joins_mixed_choices_is_refused_with_the_rule() -> None:
    sides = wide("side", chooses=True), wide("left", "side"), wide("right", "side")
    heights = wide("height", chooses=True), wide("up", "height"), wide("down", "height")
    both, mixed = wide("both", "right", "down"), wide("mixed", "left", "up", "both", joins=True)
    nodes = (*sides, *heights, both, mixed, wide("end", "mixed"))
    with hostile_ops(), pytest.raises(WorkflowError, match="because of what mixed joins; let all branches of one") as e:
        check_workflow(Workflow("w", nodes, outputs={"picture": "end"}))
    assert e.value.node == "end"


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
