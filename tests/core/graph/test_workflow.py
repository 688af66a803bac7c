"""A request progresses through its workflow in order: nodes that run once, rounds of regions, side nodes, choices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import WorkflowError
from core.graph.progress import Progress, preview_steps
from core.graph.risks import NEVER, Risks
from core.graph.skipping import skipped_by
from core.graph.workflow import Edge, Node, Region, Workflow
from core.graph.workflows.hires import HIRES
from core.graph.workflows.inpaint import INPAINT


def ready(progress: Progress) -> list[str]:
    return [node.name for node in progress.ready()]


def run(progress: Progress, *names: str) -> None:
    for name in names:
        progress.start(progress.workflow.node(name))
        progress.finish(progress.workflow.node(name))


def inpaint(steps: int, *previews: int) -> Progress:
    return Progress(INPAINT, {"denoise": steps}, {"preview": previews})


def test_two_nodes_of_one_name_are_refused() -> None:
    with pytest.raises(WorkflowError, match="two nodes are named a"):
        Workflow("w", (Node("a", "text_encode"), Node("a", "text_encode")), {"picture": "a"})


def test_progress_through_the_graph() -> None:
    progress = inpaint(2)
    assert ready(progress) == ["text_encode", "image_encode"]
    run(progress, "text_encode")
    assert ready(progress) == ["image_encode"]
    run(progress, "image_encode")
    assert ready(progress) == ["denoise"]
    run(progress, "denoise")
    assert ready(progress) == ["denoise"]
    run(progress, "denoise")
    assert ready(progress) == ["decode"]
    run(progress, "decode")
    assert ready(progress) == []
    assert progress.num_in_flight == 0


def test_steps_may_be_scheduled_ahead_of_their_results_but_decoding_may_not() -> None:
    progress = inpaint(2)
    run(progress, "text_encode", "image_encode")
    progress.start(INPAINT.node("denoise"))
    assert ready(progress) == ["denoise"]
    progress.start(INPAINT.node("denoise"))
    assert ready(progress) == []


def test_a_request_is_ending_when_all_that_is_left_is_in_flight() -> None:
    progress = inpaint(1)
    run(progress, "text_encode", "image_encode")
    progress.start(INPAINT.node("denoise"))
    assert not progress.is_ending, "decoding is left"
    progress.finish(INPAINT.node("denoise"))
    assert not progress.is_ending
    progress.start(INPAINT.node("decode"))
    assert progress.is_ending
    progress.is_restarting = True
    assert not progress.is_ending
    progress.finish(INPAINT.node("decode"))
    assert not progress.is_ending


def test_a_second_region_begins_when_the_first_is_over() -> None:
    progress = Progress(HIRES, {"first_denoise": 2, "denoise": 1})
    run(progress, "text_encode", "first_encode", "first_denoise")
    assert ready(progress) == ["first_denoise"]
    assert progress.steps_left == 2
    run(progress, "first_denoise")
    assert ready(progress) == ["upscale"]
    run(progress, "upscale", "image_encode", "denoise")
    assert ready(progress) == ["decode"]
    assert progress.steps_left == 0


@given(st.integers(1, 200), st.integers(0, 3))
def test_previews_are_spread_evenly_before_the_end(steps: int, previews: int) -> None:
    due = preview_steps(steps, previews)
    assert list(due) == sorted(set(due))
    assert all(0 < step < steps for step in due)
    assert len(due) == min(previews, steps - 1)


def test_only_what_comes_after_the_last_rounds_may_run_apart() -> None:
    assert INPAINT.after_rounds == {"preview", "decode"}
    assert HIRES.after_rounds == {"preview", "decode"}


# ---------------------------------------------------------------------------------------------------- regions

CONTROLLED = Workflow(
    "controlled",
    (
        Node("start", "x"),
        Node("hint", "x", (Edge("start", "y", carried="step"),), region="loop"),
        Node("step", "x", (Edge("start", "y", carried="step"), Edge("hint", "y", deferred=True)), region="loop"),
        Node("end", "x", (Edge("step", "y"),)),
    ),
    {"picture": "end"},
    regions=(Region("loop"),),
)
"""Two nodes per round; the second may start as soon as the first has been sent."""


def test_a_reader_of_a_deferred_value_starts_with_its_source_and_not_before() -> None:
    progress = Progress(CONTROLLED, {"loop": 2})
    run(progress, "start")
    assert ready(progress) == ["hint"]
    progress.start(CONTROLLED.node("hint"))
    assert ready(progress) == ["step"], "the next hint reads what this round's step makes"
    progress.start(CONTROLLED.node("step"))
    assert ready(progress) == ["hint"]


def test_the_number_of_rounds_is_known_when_a_region_begins() -> None:
    nodes = (Node("start", "x"), Node("step", "x", (Edge("start", "y", carried="step"),), region="loop"))
    shows = Node("look", "x", (Edge("step", "y"),), shows="step")
    end = Node("end", "x", (Edge("step", "y"),))
    workflow = Workflow("w", (*nodes, shows, end), {"picture": "end"}, (Region("loop"),))
    assert workflow.begins["start"].name == "loop"
    progress = Progress(workflow, {"loop": 9}, {"look": (1, 4, 8)})
    run(progress, "start")
    progress.set_rounds("loop", 2)
    assert progress.shown == {"look": (1,)}
    run(progress, "step")
    assert ready(progress) == ["step", "look"]
    run(progress, "step")
    assert ready(progress) == ["look"], "the output waits for the side node"
    run(progress, "look")
    assert ready(progress) == ["end"]
    with pytest.raises(AssertionError, match="has begun"):
        progress.set_rounds("loop", 3)


def test_a_region_without_previews_has_no_side_node_left() -> None:
    nodes = (Node("start", "x"), Node("step", "x", (Edge("start", "y", carried="step"),), region="loop"))
    shows = Node("look", "x", (Edge("step", "y"),), shows="step")
    end = Node("end", "x", (Edge("step", "y"),))
    progress = Progress(
        Workflow("w", (*nodes, shows, end), {"picture": "end"}, (Region("loop"),)), {"loop": 3}, {"look": (2,)}
    )
    run(progress, "start")
    progress.set_rounds("loop", 1)
    run(progress, "step")
    assert ready(progress) == ["end"]


# ---------------------------------------------------------------------------------------------------- choices

BRANCHED = Workflow(
    "branched",
    (
        Node("check", "x", chooses=True),
        Node("left", "x", (Edge("check", "y"),)),
        Node("right", "x", (Edge("check", "y"),)),
        Node("more", "x", (Edge("right", "y"),)),
        Node("join", "x", (Edge("left", "y"), Edge("more", "y")), joins=True),
    ),
    {"picture": "join"},
)


def test_what_was_not_chosen_is_skipped_and_a_join_goes_on() -> None:
    progress = Progress(BRANCHED, {})
    run(progress, "check")
    assert progress.choose(BRANCHED.node("check"), "left") == {"right", "more"}
    assert ready(progress) == ["left"]
    run(progress, "left")
    assert ready(progress) == ["join"]


def test_a_node_that_does_not_join_is_skipped_with_any_of_its_sources() -> None:
    joined = tuple(Node("join", "x", node.inputs) if node.name == "join" else node for node in BRANCHED.nodes)
    workflow = Workflow("w", joined, {"picture": "join"})
    assert skipped_by(workflow, {"check": "left"}) == {"right", "more", "join"}
    assert Risks(workflow).of("join") == NEVER
    assert Risks(BRANCHED).may_skip("join") is None
