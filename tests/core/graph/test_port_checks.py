"""Workflows of nodes with ports of their own: what is refused, with the node and the input that are wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from run_workflows import (
    DIAMOND,
    GUARD,
    GUARD_OF_PREVIEWS,
    GUARDED,
    JUDGED,
    PICTURE,
    REPAINTED,
    UNSHOWN,
    VECTOR,
    mixer,
    shouter,
)

import core.scheduling.ops  # noqa: F401  registers the ops
from core.errors import WorkflowError
from core.graph.catalog import WORKFLOWS, with_registered
from core.graph.check import check_workflow
from core.graph.form import INTEGER, MAX_FORM_BYTES, NUMBER, TRUTH, Form, picture, tensor, text
from core.graph.op import Port
from core.graph.port_checks import MAX_PORTS, MAX_TEXT_LITERALS
from core.graph.workflow import Edge, Node, Region, Workflow
from core.graph.workflows.inpaint import PREVIEW

A, B = Port.of("a", VECTOR), Port.of("b", VECTOR, is_optional=True)
LONG = Port.of("a", tensor("float32", 17))
ODD = Port.of("vector", tensor("bfloat16", 16))


def test_the_workflows_of_these_tests_are_sound() -> None:
    assert with_registered([DIAMOND], ["mixer"]).keys() == {*WORKFLOWS, "diamond"}


def test_workflows_for_pictures_have_variants_for_masks_to_find_and_for_controlnets() -> None:
    """Whose previews would not pass through the class either."""
    found = with_registered([GUARDED, JUDGED], ["guard"])
    names = ("guarded", "controlled_guarded", "selected_guarded", "selected_controlled_guarded")
    between = [found[name].last_between for name in names]
    assert [node and node.name for node in between] == ["guard"] * 4
    assert found["selected_judged"].last_between is None
    assert found["selected_controlled_judged"].nodes[0].op == "segment"


def changed(name: str, **changes: object) -> Workflow:
    """DIAMOND with other values in fields of a node."""
    nodes = (replace(node, **changes) if node.name == name else node for node in DIAMOND.nodes)  # type: ignore[arg-type]
    return replace(DIAMOND, nodes=tuple(nodes))


def showing(workflow: Workflow, *sides: Node) -> Workflow:
    """With further side nodes."""
    return replace(workflow, nodes=(*workflow.nodes, *sides))


def of_previews(**changes: object) -> Workflow:
    """GUARDED with other values in fields of the node that previews pass."""
    return showing(UNSHOWN, PREVIEW, replace(GUARD_OF_PREVIEWS, **changes))  # type: ignore[arg-type]


SECOND = replace(GUARD, name="second_guard", inputs=(Edge("guard", "image"),))
TWICE = replace(showing(UNSHOWN, SECOND), outputs={"picture": "second_guard"}, output_ports={"picture": "image"})
"""Two classes in a row."""

REPAINTED_AND_JUDGED = replace(
    showing(REPAINTED, replace(GUARD, name="second_guard", inputs=(Edge("again_decode", "picture", "image"),))),
    outputs={"picture": "second_guard"},
    output_ports={"picture": "image"},
)
"""Two classes, each behind a pass."""


def side_of(shown: str) -> tuple[Node, Node]:
    """Side nodes that show a step's rounds through a class."""
    decode = replace(PREVIEW, inputs=(Edge(shown, "clean", "latents"),), shows=shown)
    return decode, replace(GUARD_OF_PREVIEWS, shows=shown)


def test_previews_may_pass_what_the_picture_passes() -> None:
    third = replace(SECOND, name="third", inputs=(Edge("guard_preview", "image"),), shows="denoise")
    for workflow in (
        GUARDED,
        JUDGED,
        showing(TWICE, PREVIEW, GUARD_OF_PREVIEWS, third),
        showing(REPAINTED, side_of("again")[0]),
        showing(REPAINTED_AND_JUDGED, *side_of("again")),
    ):
        check_workflow(workflow)


@pytest.mark.parametrize(
    ("workflow", "node", "input", "reason"),
    [
        (showing(REPAINTED_AND_JUDGED, *side_of("denoise")), "guard_preview", "", "picture of second_guard passes"),
        (changed("left", inputs=()), "left", "a", "its input a is not connected"),
        (changed("left", inputs=(Edge("top", "mean", "a"),)), "left", "a", "takes tensor, and top.mean is number"),
        (changed("left", inputs=(Edge("top", "z", "a"),)), "left", "a", "top makes no z"),
        (changed("left", inputs=(Edge("top", "y", "c"),)), "left", "a", "is not connected"),
        (changed("top", makes=(replace(LONG, name="y"), DIAMOND.nodes[0].makes[1])), "left", "a", "up to .17."),
        (changed("top", given={"a": "vector", "b": "vectors"}), "top", "b", "the workflow has no input vectors"),
        (changed("top", given={"a": "vector", "c": "vector"}), "top", "c", "it has no input of this name"),
        (changed("top", inputs=(), given={}), "top", "a", "its input a is not connected"),
        (changed("left", given={"a": "vector"}), "left", "a", "connected more than once"),
        (changed("right", literals={"scale": 1.0}), "right", "scale", "connected more than once"),
        (changed("left", literals={"size": 1.0}), "left", "size", "it has no input of this name"),
        (changed("left", literals={"scale": "2"}), "left", "scale", "its literal: it is a str, and number is declared"),
        (
            changed("left", literals={"scale": True}),
            "left",
            "scale",
            "its literal: it is a bool, and number is declared",
        ),
        (changed("left", literals={"scale": float("nan")}), "left", "scale", "its literal: it is no finite number"),
        (changed("left", literals={"scale": 10**400}), "left", "scale", "its literal: it is no finite number"),
        (changed("left", literals={"b": 1.0}), "left", "b", "its literal: it is a float, and tensor float32"),
        (changed("end", makes=()), "end", "", "it makes nothing"),
        (changed("left", takes=(A, A)), "left", "a", "two inputs have this name"),
        (changed("left", takes=(A, replace(B, name="not one"))), "left", "not one", "a Python identifier"),
        (changed("left", takes=(A, Port("b", "tensor"))), "left", "b", "it has no form; make it by Port.of"),
        (changed("left", takes=(A, Port.of("b", tensor("float32", 0)))), "left", "b", "each at least 1"),
        (changed("left", takes=(A, Port.of("b", tensor("int8", 4)))), "left", "b", "there is no dtype int8"),
        (changed("left", takes=(A, Port.of("b", text(MAX_FORM_BYTES + 1)))), "left", "b", "is too large"),
        (
            changed("left", takes=(A, *(Port.of(f"b{n}", NUMBER, is_optional=True) for n in range(MAX_PORTS)))),
            "left",
            "",
            "it has 65 inputs; there may be 64",
        ),
        (changed("left", makes=(Port.of("y", VECTOR, is_optional=True),)), "left", "", "none is optional"),
        (changed("top", chooses=True), "top", "", "makes the text chosen"),
        (changed("left", op="upscale"), "left", "", "op upscale has ports already"),
        (changed("left", op="no such"), "left", "", "there is no op no such"),
        (replace(DIAMOND, output_ports={"sum": "y"}), "", "mean", "which output of end it is must be named"),
        (replace(DIAMOND, output_ports={"sum": "y", "mean": "z"}), "", "mean", "z is none"),
        (
            replace(changed("top", takes=(replace(ODD, name="a"),)), inputs=(ODD,)),
            "",
            "vector",
            "NumPy has no bfloat16",
        ),
        (replace(DIAMOND, inputs=(Port("vector", "tensor"),)), "", "vector", "it has no form"),
        (replace(DIAMOND, output_ports={"sum": "y", "mean": "y"}), "", "sum", "another result is output y of end"),
        (
            replace(DIAMOND, output_ports=dict(DIAMOND.output_ports, more="y")),
            "",
            "more",
            "and outputs not of which node",
        ),
        (changed("left", takes=(A, Port.of("b", Form("picture", (4, 4, 1))))), "left", "b", "no shape of a picture"),
        (changed("left", takes=(A, Port.of("b", Form("text")))), "left", "b", "is no shape of a text"),
        (replace(DIAMOND, inputs=(Port.of("vector", VECTOR, is_optional=True),)), "top", "a", "may be left out"),
        (replace(DIAMOND, outputs={"sum": "none"}, output_ports={"sum": "y"}), "none", "", "there is no node none"),
        (replace(DIAMOND, nodes=(*DIAMOND.nodes, Node("text", "text_encode"))), "", "picture", "a picture that is no"),
        (showing(UNSHOWN, PREVIEW), "preview", "", "what does not pass all nodes that the picture of guard passes"),
        (showing(REPAINTED, PREVIEW), "preview", "", "what does not pass all nodes that the picture of again_decode"),
        (showing(GUARDED, replace(PREVIEW, name="bare")), "bare", "", "what does not pass all nodes"),
        (of_previews(given={"words": "prompt"}), "guard_preview", "", "what does not pass all nodes"),
        (of_previews(role="inverter"), "guard_preview", "", "what does not pass all nodes"),
        (
            of_previews(literals={"strictness": 0.0}, given={"words": "prompt"}),
            "guard_preview",
            "",
            "not pass all nodes",
        ),
        (
            showing(UNSHOWN, replace(GUARD_OF_PREVIEWS, inputs=GUARD.inputs)),
            "decode",
            "latents",
            "a way out of a region",
        ),
        (showing(TWICE, PREVIEW, GUARD_OF_PREVIEWS), "guard_preview", "", "the picture of second_guard passes"),
        (replace(REPAINTED, is_mask_aware=True), "again_encode", "picture", "read pages of the request's own picture"),
        (
            replace(GUARDED, outputs={"picture": "guard"}, output_ports={"picture": "mean"}),
            "",
            "picture",
            "it is a number, and a picture is due",
        ),
        (replace(JUDGED, outputs={**JUDGED.outputs, "more": "denoise"}), "", "more", "denoise makes no such result"),
        (replace(JUDGED, outputs={**JUDGED.outputs, "picture": "denoise"}), "", "picture", "denoise makes no such"),
        (replace(JUDGED, output_ports={**JUDGED.output_ports, "picture": "x"}), "", "picture", "decode makes no such"),
        (replace(GUARDED, inputs=(Port("prompt", "text"), *GUARDED.inputs[1:])), "", "prompt", "it has no form"),
        (replace(WORKFLOWS["inpaint"], output_ports={"picture": "x"}), "", "", "of nodes with ports of their own"),
    ],
)
def test_what_cannot_run_is_refused_with_node_and_input(workflow: Workflow, node: str, input: str, reason: str) -> None:
    with pytest.raises(WorkflowError, match=reason) as caught:
        check_workflow(workflow)
    assert (caught.value.node, caught.value.input) == (node, input)


def test_a_long_text_is_no_literal() -> None:
    port = Port.of("words", text(4 * MAX_TEXT_LITERALS))
    node = replace(shouter("only"), takes=(port,), literals={"words": "x" * (MAX_TEXT_LITERALS + 1)})
    with pytest.raises(WorkflowError, match="bytes of text, and there may be 4096; give it by an input"):
        check_workflow(Workflow("long", (node,), {"y": "only"}, output_ports={"y": "y"}))
    short = replace(node, literals={"words": "x" * 65})
    check_workflow(Workflow("long", (short,), {"y": "only"}, output_ports={"y": "y"}))
    with pytest.raises(
        WorkflowError, match=r"its literal: its shape is \[65\], and text of up to 64 bytes is declared"
    ):
        check_workflow(
            Workflow(
                "long", (replace(short, takes=(Port.of("words", text(64)),)),), {"y": "only"}, output_ports={"y": "y"}
            )
        )


def test_a_region_of_own_ports_carries_values_that_fit() -> None:
    begin = replace(mixer("begin"), given={"a": "vector"})
    loop = replace(mixer("loop"), inputs=(Edge("begin", "y", "a", carried="loop"),), region="r")
    end = replace(mixer("end"), inputs=(Edge("loop", "y", "a"),))
    whole = replace(DIAMOND, nodes=(begin, loop, end), regions=(Region("r"),))
    check_workflow(whole)
    for rounds in ("many", "vector"):
        with pytest.raises(WorkflowError, match="region r has so many rounds") as caught:
            check_workflow(replace(whole, regions=(Region("r", rounds=rounds),)))
        assert caught.value.input == rounds
    counted = replace(whole, inputs=(*whole.inputs, Port.of("n", INTEGER)), regions=(Region("r", rounds="n"),))
    check_workflow(counted)
    with pytest.raises(WorkflowError, match="an integer that is always given"):
        check_workflow(replace(counted, inputs=(*whole.inputs, Port.of("n", INTEGER, is_optional=True))))
    growing = replace(loop, makes=(Port.of("y", tensor("float32", 17)), loop.makes[1]))
    wide = replace(end, takes=(Port.of("a", tensor("float32", 17)),))
    with pytest.raises(WorkflowError, match="gets tensor float32 up to"):
        check_workflow(replace(whole, nodes=(begin, growing, wide)))


@pytest.mark.parametrize("name", ["", "inpaint", "diamond"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    with pytest.raises(WorkflowError, match="is here already; give it another name"):
        with_registered([DIAMOND, replace(DIAMOND, name=name)], ["mixer"])


def test_a_role_without_a_class_is_refused() -> None:
    with pytest.raises(WorkflowError, match="node top: its role mixer is played by no class: there are other"):
        with_registered([DIAMOND], ["other"])


# ------------------------------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize(
    ("form", "shape", "dtype", "is_one"),
    [
        (TRUTH, (), "bool", True),
        (INTEGER, (), "int64", True),
        (INTEGER, (1,), "int64", False),
        (NUMBER, (), "int64", False),
        (text(4), (0,), "uint8", True),
        (text(4), (5,), "uint8", False),
        (picture(4, 6), (4, 6, 3), "uint8", True),
        (picture(4, 6), (1, 2, 3), "uint8", True),
        (picture(4, 6), (6, 4, 3), "uint8", False),
        (picture(4, 6), (4, 6, 1), "uint8", False),
        (picture(4, 6), (4, 6), "uint8", False),
        (tensor("float32", 2, 3), (0, 3), "float32", True),
        (tensor("float32", 2, 3), (3, 2), "float32", False),
        (tensor("float32", 2, 3), (2, 3), "float16", False),
    ],
)
def test_an_array_is_a_value_of_a_form_within_its_bounds(
    form: Form, shape: tuple[int, ...], dtype: str, is_one: bool
) -> None:
    assert (form.why_not(shape, dtype) == "") is is_one


def test_bytes_of_a_form() -> None:
    assert [each.nbytes for each in (TRUTH, INTEGER, text(5), PICTURE, tensor("bfloat16", 2, 3))] == [1, 8, 5, 192, 12]


def test_a_reader_takes_all_that_a_smaller_port_makes() -> None:
    assert not PICTURE.why_not_from(PICTURE)
    assert not picture(9, 9).why_not_from(PICTURE)
    assert picture(7, 9).why_not_from(PICTURE)
    assert VECTOR.why_not_from(NUMBER) == "it takes tensor float32 up to [16], and gets number"
