"""Any graph is either refused with one error that names its node and input, or it can run to its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property
from random import Random

import pytest
from hostile_graphs import hostile_graph, hostile_ops, sound_graph

from core.errors import WorkflowError
from core.graph.check import check_workflow
from core.graph.op import OPS
from core.graph.progress import Progress
from core.graph.skipping import readers_of
from core.graph.workflow import Edge, Node, Region, Workflow


@pytest.fixture(autouse=True, scope="module")
def ops() -> Iterator[None]:
    with hostile_ops():
        yield


def accepted(workflow: Workflow) -> bool:
    """Whether a workflow is accepted. If it is not, its error has to say what is wrong with it."""
    try:
        check_workflow(workflow)
    except WorkflowError as error:
        check_error(workflow, error)
        return False
    return True


def check_error(workflow: Workflow, error: WorkflowError) -> None:
    """The error names a node, region or output of the workflow; and if an input, then one of that node."""
    nodes = {node.name: node for node in workflow.nodes}
    regions = {region.name for region in workflow.regions}
    assert error.node in {*nodes, *regions, *workflow.output_names}
    assert error.node in str(error)
    assert error.input in str(error)
    if error.input:
        node = nodes[error.node]
        ports = {port.name for port in OPS[node.op].inputs} if node.op in OPS else set()
        assert error.input in ports | {edge.input for edge in node.inputs}


def use(workflow: Workflow) -> None:
    """Compute all that is computed of a workflow when requests come."""
    for name, value in vars(Workflow).items():
        if isinstance(value, cached_property):
            getattr(workflow, name)
    for region in workflow.regions:
        workflow.repeated_with(region.name)


def run(workflow: Workflow, random: Random) -> None:
    """Run a request to its end: starts and ends of nodes, numbers of rounds, side nodes and choices are random."""
    rounds = {region.name: random.randint(1, 4) for region in workflow.regions}
    steps = {side.shows: due(rounds[workflow.node(side.shows).region], random) for side in workflow.side_nodes}
    shown = {side.name: steps[side.shows] for side in workflow.side_nodes}
    progress, in_flight = Progress(workflow, rounds, shown), list[Node]()
    ready = progress.ready()
    while ready or in_flight:
        for node in random.sample(ready, random.randint(0 if in_flight else 1, len(ready))):
            progress.start(node)
            in_flight.append(node)
        for node in random.sample(in_flight, random.randint(1, len(in_flight))):
            in_flight.remove(node)
            progress.finish(node)
            if node.chooses:
                progress.choose(node, random.choice(sorted(readers_of(workflow, node.name))))
        ready = progress.ready()
    assert progress.over == {node.name for node in workflow.nodes}
    assert all(progress.done[name] == 1 for name in workflow.output_names)
    assert not progress.pending


def due(rounds: int, random: Random) -> tuple[int, ...]:
    """Rounds after which a side node runs; it shows no last round."""
    return tuple(sorted(random.sample(range(1, rounds), random.randint(0, rounds - 1))))


def ends(workflow: Workflow) -> bool:
    """Whether all of some random runs reach their end."""
    try:
        for seed in range(50):
            run(workflow, Random(seed))
    except AssertionError:
        return False
    return True


def test_a_thousand_hostile_graphs_are_refused_with_one_error_or_run() -> None:
    num_accepted = 0
    for seed in range(1000):
        random = Random(seed)
        workflow = hostile_graph(random)
        if accepted(workflow):
            num_accepted += 1
            use(workflow)
            run(workflow, random)
    assert 300 < num_accepted < 700, "both ways are tested"


def test_sound_graphs_are_accepted() -> None:
    for seed in range(100):
        check_workflow(sound_graph(Random(seed)))


@pytest.mark.bench
def test_registration_takes_at_most_50_ms() -> None:
    """`pytest -m bench -s tests/core/graph/test_hostile_graphs.py` prints the times, of the processor."""
    times = sorted(min(registration_time(Random(seed)) for _ in range(3)) for seed in range(1000))
    print(f"ms of 1,000 registrations: median {times[500] * 1e3:.2f}, longest {times[-1] * 1e3:.1f}")
    assert times[-1] <= 0.05


def registration_time(random: Random) -> float:
    workflow = hostile_graph(random)
    start = time.process_time()
    if accepted(workflow):
        use(workflow)
    return time.process_time() - start


# ---------------------------------------------------------------------------------------------------- waits


def loop(*nodes: Node) -> Workflow:
    """A region of `one` and `two`, with these nodes before, between and after."""
    return Workflow("w", nodes, {"picture": "end"}, (Region("loop"),))


def node(name: str, *inputs: Edge, **fields: object) -> Node:
    return Node(name, "wide", inputs, **fields)  # type: ignore[arg-type]


START, CHECK = node("start"), node("check", chooses=True)
ONE = node("one", Edge("start", "x", "in0", carried="one"), region="loop")
FIRST = node("one", Edge("start", "x", "in0", carried="two"), region="loop")
SECOND = node("two", Edge("one", "x", "in0"), region="loop")
END = node("end", Edge("one", "x", "in0"))

STUCK = {
    "a way back into a region": (
        loop(
            START,
            FIRST,
            node("between", Edge("one", "x", "in0")),
            node("two", Edge("between", "x", "in0"), region="loop"),
            END,
        ),
        "a way out of a region and back into it",
        "between",
        "in0",
    ),
    "a side node that comes after the region": (
        loop(START, ONE, END, node("look", Edge("one", "x", "in0"), Edge("end", "x", "in1"), shows="one")),
        "a way out of a region and back into it",
        "end",
        "in0",
    ),
    "a side node that reads another node of the region": (
        loop(START, FIRST, SECOND, node("look", Edge("one", "x", "in0"), Edge("two", "x", "in1"), shows="one"), END),
        "a side node that shows one reads no other node",
        "look",
        "in1",
    ),
    "a side node that waits for the output": (
        loop(START, ONE, node("end"), node("look", Edge("one", "x", "in0"), Edge("end", "x", "in1"), shows="one")),
        "it waits for an output",
        "look",
        "in1",
    ),
    "a choice that skips a part of a region": (
        loop(
            START,
            CHECK,
            FIRST,
            node("other", Edge("check", "x", "in0")),
            node("two", Edge("one", "x", "in0"), Edge("check", "x", "in1"), region="loop"),
            node("end", Edge("start", "x", "in0")),
        ),
        "it may be skipped without one",
        "two",
        "in1",
    ),
    "branches that meet in a region": (
        loop(
            START,
            CHECK,
            node("left", Edge("check", "x", "in0"), Edge("start", "x", "in1", carried="two"), region="loop"),
            node("right", Edge("check", "x", "in0"), Edge("start", "x", "in1", carried="two"), region="loop"),
            node("two", Edge("left", "x", "in0"), Edge("right", "x", "in1"), region="loop", joins=True),
            node("end", Edge("two", "x", "in0")),
        ),
        "it may be skipped without left",
        "right",
        "in0",
    ),
    "a choice that skips a side node": (
        loop(
            START,
            CHECK,
            ONE,
            node("other", Edge("check", "x", "in0")),
            node("look", Edge("one", "x", "in0"), Edge("check", "x", "in1"), shows="one"),
            END,
        ),
        "it may be skipped without one",
        "look",
        "in1",
    ),
}


@pytest.mark.parametrize("case", STUCK)
def test_nodes_that_would_wait_forever_are_refused(case: str) -> None:
    workflow, problem, name, port = STUCK[case]
    assert not ends(workflow)
    with pytest.raises(WorkflowError, match=problem) as caught:
        check_workflow(workflow)
    assert (caught.value.node, caught.value.input) == (name, port)
