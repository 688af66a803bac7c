"""Which workflows can begin in a kept state, and what they are then."""

from __future__ import annotations

from dataclasses import replace

import pytest

import core.scheduling.ops  # noqa: F401  nodes name ops
from core.graph.catalog import WORKFLOWS, with_registered
from core.graph.check import check_workflow
from core.graph.recalling import can_recall, recalling
from core.graph.workflow import Edge, Node, Region
from core.graph.workflows.inpaint import DENOISE, INPAINT


def test_one_loop_from_noise_can_recall() -> None:
    assert [name for name, workflow in WORKFLOWS.items() if can_recall(workflow)] == ["inpaint"]


def test_its_steps_begin_with_the_state_and_nothing_else_is_changed() -> None:
    recalled = recalling(INPAINT)
    check_workflow(recalled)
    assert [node.name for node in recalled.nodes] == ["recall", *(node.name for node in INPAINT.nodes)]
    before, after = INPAINT.node("denoise").inputs, recalled.node("denoise").inputs
    changed = {edge.name: edge for edge, other in zip(after, before, strict=True) if edge != other}
    assert changed == {"latents": Edge("recall", "latents", carried="denoise")}
    assert [node for node in recalled.nodes if node.name not in ("recall", "denoise")] == [
        node for node in INPAINT.nodes if node.name != "denoise"
    ]


def test_a_users_workflow_has_a_variant_also_if_a_node_is_called_so() -> None:
    nodes = tuple(
        replace(node, name="recall") if node.name == "decode" else node for node in INPAINT.nodes if not node.shows
    )
    mine = replace(INPAINT, name="mine", nodes=nodes, outputs={"picture": "recall"})
    found = with_registered([mine], ())
    assert found["recalled_mine"].nodes[0] == Node("recall_2", "recall")


SEEN = Node("seen", "image_encode", inputs=(Edge("paint", "image", "picture"),))


def _with_condition_of(node: Node) -> tuple[Node, ...]:
    edges = (replace(edge, source=node.name) if edge.name == "condition" else edge for edge in DENOISE.inputs)
    return (replace(DENOISE, inputs=tuple(edges)),)


@pytest.mark.parametrize(
    "other",
    [
        replace(INPAINT, regions=(Region("denoise", strength=0.5),)),
        replace(INPAINT, regions=(Region("denoise", steps=4),)),
        replace(INPAINT, nodes=tuple(replace(n, role="refiner") if n.op == "denoise" else n for n in INPAINT.nodes)),
        replace(INPAINT, nodes=(*INPAINT.nodes[:2], Node("segment", "segment"), *INPAINT.nodes[3:])),
        WORKFLOWS["class_conditional"],
        replace(INPAINT, nodes=(*INPAINT.nodes[:2], SEEN, *_with_condition_of(SEEN), *INPAINT.nodes[3:])),
    ],
    ids=["strength", "steps", "role", "no steps", "no prompt", "what a class has made"],
)
def test_other_loops_cannot(other: object) -> None:
    assert DENOISE in INPAINT.nodes
    assert not can_recall(other)  # type: ignore[arg-type]
