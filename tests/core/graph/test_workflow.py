"""The stage graph refuses invalid workflows, and a request progresses through it in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.graph.progress import Progress, preview_steps
from core.graph.workflow import INPAINT, Edge, Node, Workflow, place


def test_a_graph_that_reads_a_value_before_it_is_made_is_refused() -> None:
    with pytest.raises(ValueError, match="before it is made"):
        Workflow("w", (Node("decode", "decode", (Edge("denoise", "latents"),)),), output="decode")


def test_a_graph_without_its_output_is_refused() -> None:
    with pytest.raises(ValueError, match="no node"):
        Workflow("w", (Node("a", "text_encode"),), output="b")


def test_progress_through_the_graph() -> None:
    progress = Progress(num_steps=2)

    def ready() -> list[str]:
        return [node.name for node in progress.ready(INPAINT)]

    def run(name: str) -> None:
        progress.start(INPAINT.node(name))
        progress.finish(INPAINT.node(name))

    assert ready() == ["text_encode", "image_encode"]
    run("text_encode")
    assert ready() == ["image_encode"]
    run("image_encode")
    assert ready() == ["denoise"]
    run("denoise")
    assert ready() == ["denoise"]
    run("denoise")
    assert ready() == ["decode"]
    run("decode")
    assert ready() == []
    assert progress.num_in_flight == 0


def test_steps_may_be_scheduled_ahead_of_their_results_but_decoding_may_not() -> None:
    progress = Progress(num_steps=2, done={"text_encode", "image_encode"})
    progress.start(INPAINT.node("denoise"))
    assert [node.name for node in progress.ready(INPAINT)] == ["denoise"]
    progress.start(INPAINT.node("denoise"))
    assert progress.ready(INPAINT) == []


@given(st.integers(1, 200), st.integers(0, 3))
def test_previews_are_spread_evenly_before_the_end(steps: int, previews: int) -> None:
    due = preview_steps(steps, previews)
    assert list(due) == sorted(set(due))
    assert all(0 < step < steps for step in due)
    assert len(due) == min(previews, steps - 1)


def test_decoding_is_placed_apart_when_there_is_a_second_worker() -> None:
    assert set(place(INPAINT, 1).values()) == {0}
    assert {name for name, rank in place(INPAINT, 2).items() if rank == 1} == {"preview", "decode"}
