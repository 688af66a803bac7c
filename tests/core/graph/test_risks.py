"""Which nodes are sure to run, whatever the nodes that choose will choose."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import product
from random import Random

import pytest
from hostile_graphs import tangle

from core.graph.risks import NEVER, Risks
from core.graph.skipping import readers_of, skipped_by
from core.graph.workflow import Edge, Node, Workflow


def node(name: str, *sources: str, **fields: bool) -> Node:
    return Node(name, "x", tuple(Edge(source, "y") for source in sources), **fields)


def join(name: str, *sources: str) -> Node:
    return node(name, *sources, joins=True)


def choice(name: str, *readers: str) -> tuple[Node, ...]:
    """A node that chooses, and its readers."""
    return (node(name, chooses=True), *(node(reader, name) for reader in readers))


def risks_of(*nodes: Node) -> Risks:
    return Risks(Workflow("w", nodes, {"picture": nodes[-1].name}))


LEFT_OR_RIGHT = choice("side", "left", "right")
UP_OR_DOWN = choice("height", "up", "down")
SAFE = {
    "a node before all choices": (node("a"), *LEFT_OR_RIGHT, node("end", "a")),
    "branches that meet": (*LEFT_OR_RIGHT, join("end", "left", "right")),
    "some branches that meet earlier": (
        *choice("which", "a", "b", "c"),
        join("a_or_b", "a", "b"),
        join("end", "a_or_b", "c"),
    ),
    "a choice in a branch": (
        *LEFT_OR_RIGHT,
        node("again", "left", chooses=True),
        node("a", "again"),
        node("b", "again"),
        join("end", "a", "b", "right"),
    ),
    "two choices, in turn": (
        *LEFT_OR_RIGHT,
        join("first", "left", "right"),
        node("again", "first", chooses=True),
        node("a", "again"),
        node("b", "again"),
        join("end", "a", "b"),
    ),
    "two choices, and all pairs": (
        *LEFT_OR_RIGHT,
        *UP_OR_DOWN,
        node("a", "left", "up"),
        node("b", "left", "down"),
        node("c", "right", "up"),
        node("d", "right", "down"),
        join("end", "a", "b", "c", "d"),
    ),
    "two choices, the first in a branch of the second": (
        *LEFT_OR_RIGHT,
        *UP_OR_DOWN,
        node("a", "left", "up"),
        node("b", "right", "up"),
        join("end", "a", "b", "down"),
    ),
    "a source that always runs": (
        *LEFT_OR_RIGHT,
        *UP_OR_DOWN,
        node("a", "left", "up"),
        node("b"),
        join("end", "a", "b"),
    ),
    "a source that never runs": (*LEFT_OR_RIGHT, node("both", "left", "right"), join("end", "left", "right", "both")),
}


@pytest.mark.parametrize("case", SAFE)
def test_a_node_is_safe_if_all_branches_of_each_choice_meet_before_it(case: str) -> None:
    assert risks_of(*SAFE[case]).may_skip("end") is None


UNSAFE = {
    "a branch": ((*LEFT_OR_RIGHT, node("end", "left")), {"side": "right"}),
    "some of the branches": ((*choice("which", "a", "b", "c"), join("end", "a", "b")), {"which": "c"}),
    "branches of two choices": (
        (*LEFT_OR_RIGHT, *UP_OR_DOWN, join("end", "left", "up")),
        {"side": "right", "height": "down"},
    ),
    "after branches of two choices": (
        (*LEFT_OR_RIGHT, *UP_OR_DOWN, join("mix", "left", "up"), node("a", "mix"), node("end", "a")),
        {"side": "right", "height": "down"},
    ),
    "a node that joins and reads a chooser": (
        (
            node("first", chooses=True),
            node("second", "first", chooses=True),
            node("a", "second"),
            join("end", "first", "second"),
        ),
        {"first": "second", "second": "a"},
    ),
    "never": ((*LEFT_OR_RIGHT, node("end", "left", "right")), {}),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_the_choices_that_skip_a_node_are_shown(case: str) -> None:
    nodes, choices = UNSAFE[case]
    assert risks_of(*nodes).may_skip("end") == choices


def test_a_safe_node_that_the_rule_refuses_and_its_repair() -> None:
    """No two of its three sources differ in one choice only."""
    mixed = (*LEFT_OR_RIGHT, *UP_OR_DOWN, node("both", "right", "down"))
    refused = join("end", "left", "up", "both")
    assert tried_choices(Workflow("w", (*mixed, refused), {"picture": "end"}), "end") is None
    assert risks_of(*mixed, refused).may_skip("end") == {}
    repaired = (node("also", "right", "up"), join("on_the_right", "also", "both"), join("end", "left", "on_the_right"))
    assert risks_of(*mixed, *repaired).may_skip("end") is None


# ---------------------------------------------------------------------------------------------------- any graph


def tried_choices(workflow: Workflow, name: str) -> Mapping[str, str] | None:
    """Choices that skip a node, found by trying all: exact, and exponential in the number of nodes that choose."""
    choosers = [node.name for node in workflow.nodes if node.chooses]
    for choice in product(*(sorted(readers_of(workflow, chooser)) for chooser in choosers)):
        chosen = dict(zip(choosers, choice, strict=True))
        if name in skipped_by(workflow, chosen):
            return chosen
    return None


def any_choices(workflow: Workflow, random: Random) -> dict[str, str]:
    choosers = [node.name for node in workflow.nodes if node.chooses]
    return {chooser: random.choice(sorted(readers_of(workflow, chooser))) for chooser in choosers}


def test_what_the_rule_takes_for_safe_is_never_skipped() -> None:
    """In random graphs it agrees with trying all choices but for a few nodes, which it takes for unsafe."""
    random, num_safe, num_refused = Random(2), 0, 0
    for _ in range(500):
        workflow = tangle(random, random.randint(4, 12), random.choice((2, 3)), random.randint(1, 4))
        risks = Risks(workflow)
        choosers = {node.name for node in workflow.nodes if node.chooses}
        for name in workflow.downstream(choosers) - choosers:
            tried, found = tried_choices(workflow, name), risks.may_skip(name)
            if tried is None:
                num_safe += 1
                num_refused += found is not None
                assert not found
            else:
                assert found is not None
                assert name in skipped_by(workflow, any_choices(workflow, random) | dict(found)) or not found
    assert num_safe > 200
    assert num_refused < 0.05 * num_safe


def test_nodes_that_never_run_are_those_that_all_choices_skip() -> None:
    random = Random(3)
    for _ in range(100):
        workflow = tangle(random, 8, 3, 2)
        risks = Risks(workflow)
        for node in workflow.nodes:
            if risks.of(node.name) == NEVER:
                assert node.name in skipped_by(workflow, any_choices(workflow, random))


@pytest.mark.parametrize("num_choices", [60])
def test_many_choices_take_no_long_time(num_choices: int) -> None:
    """Trying all of them would take 2^60 trials."""
    nodes = [each for i in range(num_choices) for each in choice(f"c{i}", f"a{i}", f"b{i}")]
    nodes += [join(f"j{i}", f"a{i}", f"b{i}") for i in range(num_choices)]
    safe = node("safe", *(f"j{i}" for i in range(num_choices)))
    mixed = join("mixed", *(f"a{i}" for i in range(num_choices)))
    start = time.process_time()
    risks = risks_of(*nodes, safe, mixed)
    assert risks.may_skip("safe") is None
    assert risks.may_skip("mixed") == {f"c{i}": f"b{i}" for i in range(num_choices)}
    assert time.process_time() - start < 5.0
