"""The value table: readers, moves, frees and losses; and which runs are repeated when values are lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from any_ranks import in_workflow, toy_op
from fakes import MODEL
from hypothesis import given
from hypothesis import strategies as st
from workflows import TOY, workflows

from core.graph.check import check_workflow
from core.graph.progress import Progress, preview_steps
from core.graph.workflow import Edge, Node, Region, Workflow
from core.graph.workflows.inpaint import INPAINT
from core.handles import VALUE_ARENA, TensorKey, TensorRef
from core.messages.worker import Free
from core.scheduling.requests.bindings import Bindings
from core.scheduling.requests.request import Request
from core.scheduling.values.lineage import runs_to_keep
from core.scheduling.values.request_values import resume
from core.scheduling.values.value_keys import keys_done, keys_read, num_reads
from core.scheduling.values.values import ValueTable


@pytest.fixture(autouse=True, scope="module")
def toy() -> Iterator[None]:
    with toy_op():
        yield


def ref(name: str, *, request: str = "r", version: int = 0, rank: int = 0, nbytes: int = 100) -> TensorRef:
    return TensorRef(TensorKey(request, "node", name, version), rank, (nbytes,), "uint8", nbytes)


def test_a_value_is_freed_when_its_last_reader_is_done() -> None:
    table, value = ValueTable(), ref("latents")
    table.add(value, {value.rank}, 2)
    table.done_reading(value.key)
    assert table.take_freed() == []
    table.done_reading(value.key)
    assert table.take_freed() == [Free(value.key, (0,))]
    assert table.get(value.key) is None
    table.done_reading(value.key)
    assert table.take_freed() == [], "it was never made, or is gone"


def test_a_value_that_is_made_again_replaces_the_only_one_of_its_request() -> None:
    table, value = ValueTable(), ref("latents")
    table.add(value, {value.rank}, 1)
    table.add(value, {value.rank}, 2)
    found = table.get(value.key)
    assert found is not None
    assert found.readers_left == 2
    table.check_integrity({"r"})


def test_a_value_that_no_node_reads_is_freed_at_once() -> None:
    table, value = ValueTable(), ref("unread")
    table.add(value, {value.rank}, 0)
    assert table.take_freed() == [Free(value.key, (0,))]


def test_several_values_of_a_request_move_at_once_and_none_overlap() -> None:
    table, values = ValueTable(), [ref("a", nbytes=100), ref("b", nbytes=5000), ref("c", rank=1, nbytes=70_000)]
    for value in values:
        table.add(value, {value.rank}, 1)
    transfers = table.move([value.key for value in values], {0, 1})
    assert transfers is not None
    assert [transfer.source for transfer in transfers] == [0, 0, 1]
    places = []
    for transfer, value in zip(transfers, values, strict=True):
        handle = transfer.ref.handle
        assert handle is not None
        assert (handle.arena, handle.size, handle.dtype) == (VALUE_ARENA, value.nbytes, "uint8")
        assert table.get(value.key).exported is None, "it is not there yet"  # type: ignore[union-attr]
        places.append(range(handle.offset, handle.offset + handle.size))
    assert not set(places[0]) & set(places[1]) | set(places[1]) & set(places[2])
    assert table.num_moving == 3
    assert table.move([values[0].key], {0, 1}) == [], "it is on its way"
    for value in values:
        table.end_move(value.key)
        assert table.get(value.key).exported is not None  # type: ignore[union-attr]
    assert table.num_moving == 0
    table.check_integrity({"r"})


def test_values_that_do_not_fit_wait_and_take_no_space() -> None:
    table = ValueTable(num_bytes=256)
    for name in ("a", "b", "c"):
        table.add(ref(name, nbytes=100), {0}, 1)
    assert table.move([ref("a").key], {0}) is not None
    assert table.move([ref("b").key, ref("c").key], {0}) is None
    table.check_integrity({"r"})
    table.end_move(ref("a").key)
    table.done_reading(ref("a").key)
    moved = table.move([ref("b").key, ref("c").key], {0})
    assert moved is not None
    assert len(moved) == 2


def test_a_request_that_ends_leaves_no_values() -> None:
    table = ValueTable()
    table.add(ref("a"), {0}, 1)
    table.add(ref("a", request="s"), {0}, 1)
    table.move([ref("a").key], {0})
    table.end_move(ref("a").key)
    table.forget("r")
    table.check_integrity({"s"})
    assert table.take_freed() == [], "the workers free all of an ended request's tensors together"


@given(st.data())
def test_random_lives_of_values_leave_nothing_behind(data: st.DataObject) -> None:
    """Values are made, read, moved in any order, and requests end in any order; space is used exactly while it must."""
    table, readers, moving = ValueTable(num_bytes=1 << 14), dict[TensorKey, int](), set[TensorKey]()
    for step in range(data.draw(st.integers(1, 40))):
        choice = data.draw(st.sampled_from(("make", "read", "move", "moved", "end")))
        if choice == "make":
            value = ref(f"v{step}", request=data.draw(st.sampled_from("abc")), nbytes=data.draw(st.integers(0, 3000)))
            count = data.draw(st.integers(1, 3))
            table.add(value, {0}, count)
            readers[value.key] = count
        elif choice == "end" and not moving:
            request = data.draw(st.sampled_from("abc"))
            table.forget(request)
            readers = {key: count for key, count in readers.items() if key.request_id != request}
        elif choice == "moved" and moving:
            key = data.draw(st.sampled_from(sorted(moving, key=str)))
            moving.remove(key)
            table.end_move(key)
        elif choice == "move" and readers:
            keys = data.draw(st.lists(st.sampled_from(sorted(readers, key=str)), min_size=1, unique=True))
            transfers = table.move(keys, {0})
            moving |= {transfer.ref.key for transfer in transfers or ()}
        elif choice == "read" and (free := sorted(readers.keys() - moving, key=str)):
            key = data.draw(st.sampled_from(free))
            table.done_reading(key)
            readers[key] -= 1
            if not readers[key]:
                del readers[key]
                assert Free(key, (0,)) in table.take_freed()
        table.check_integrity("abc")
        assert {key for request in "abc" for key in table.keys(request)} == set(readers)
        assert table.num_moving == len(moving)
    for key in moving:
        table.end_move(key)
    for request in "abc":
        table.forget(request)
    table.check_integrity(())


# ------------------------------------------------------------------------------------------------------ of workflows


def runs_of(progress: Progress, node: Node) -> int:
    return progress.rounds[node.region] if node.region else 1


def made_by(node: Node, round_: int) -> set[TensorKey]:
    return {TensorKey("r", node.name, port.name, round_ + 1 if node.region else 0) for port in TOY.outputs}


def run_node(progress: Progress, node: Node, table: ValueTable) -> None:
    """Run a node once, and keep the table's books."""
    round_ = progress.round_of(node)
    for key in keys_read("r", progress, node, round_):
        assert table.get(key) is not None, f"{node.name} reads {key}, which is freed"
    progress.start(node)
    progress.finish(node)
    for key in sorted(made_by(node, round_), key=str):
        readers = num_reads(progress, node, key.name, key.version)
        table.add(TensorRef(key, 0, (1,), "uint8", 1), {0}, readers)
    for key in keys_done("r", progress, node, round_):
        table.done_reading(key)
    table.check_integrity({"r"})


def run_whole(progress: Progress, index: int = -1) -> ValueTable:
    """Run every node of a request, of those that are ready always the first, or the last: regions round by round."""
    table = ValueTable()
    while ready := progress.ready():
        run_node(progress, ready[index], table)
    assert progress.over == {node.name for node in progress.workflow.nodes}
    return table


def progress_of(workflow: Workflow, data: st.DataObject) -> Progress:
    rounds = {region.name: data.draw(st.integers(1, 4)) for region in workflow.regions}
    num_shown = {region.name: data.draw(st.integers(0, 2)) for region in workflow.regions}
    regions = {side.name: workflow.node(side.shows).region for side in workflow.side_nodes}
    shown = {side: preview_steps(rounds[region], num_shown[region]) for side, region in regions.items()}
    return Progress(workflow, rounds, shown)


@given(workflows(), st.data())
def test_every_value_lives_exactly_until_its_last_reader(workflow: Workflow, data: st.DataObject) -> None:
    assert run_whole(progress_of(workflow, data)).keys("r") == []


@pytest.mark.parametrize("name", ["carrier", "inside", "look"])
def test_a_node_may_read_a_value_through_two_inputs(name: str) -> None:
    """It is there for the other readers after it, in the usual rounds and in the first and last."""
    carrier = Node("carrier", "toy", (Edge("first", "x", "in0", carried="carrier"),), region="r")
    others = (
        Node("inside", "toy", (Edge("carrier", "x", "in0"),), region="r"),
        Node("later", "toy", (Edge("carrier", "x", "in0"), Edge("inside", "x", "in1", deferred=True)), region="r"),
        Node("look", "toy", (Edge("carrier", "x", "in0"),), shows="carrier"),
        Node("end", "toy", (Edge("later", "x", "in0"), Edge("carrier", "x", "in1"))),
    )
    nodes = (Node("first", "toy"), carrier, *others)
    doubled = (replace(node, inputs=(*node.inputs, replace(node.inputs[0], port="in5"))) for node in nodes[1:])
    twice = {node.name: node for node in doubled}[name]
    workflow = Workflow(
        "w", tuple(twice if node.name == name else node for node in nodes), {"picture": "end"}, (Region("r"),)
    )
    check_workflow(workflow)
    for index, shown in product((0, -1), ((1,), (1, 2, 3))):
        assert run_whole(Progress(workflow, {"r": 4}, {"look": shown}), index).keys("r") == []


def all_made(progress: Progress) -> list[TensorKey]:
    nodes = progress.workflow.nodes
    return sorted(
        {key for node in nodes for round_ in range(runs_of(progress, node)) for key in made_by(node, round_)}, key=str
    )


@given(workflows(can_choose=False, with_sides=False), st.data())
def test_lost_values_are_made_again_from_what_survives(workflow: Workflow, data: st.DataObject) -> None:
    """Whatever is lost of a request that has done all: each repeated run finds its inputs, all that is lost is made,
    and no node goes back further than one of these needs.
    """
    progress = progress_of(workflow, data)
    progress.done = {node.name: runs_of(progress, node) for node in workflow.nodes}
    every = all_made(progress)
    survivors = set(data.draw(st.lists(st.sampled_from(every), unique=True)))
    lost = set(data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True))) - survivors
    kept = runs_to_keep("r", progress, lost, survivors.__contains__, {(key.node, key.name) for key in every})
    again = [
        (workflow.node(name), round_) for name, first in kept.items() for round_ in range(first, progress.done[name])
    ]
    made = {key for node, round_ in again for key in made_by(node, round_)}
    read = {key for node, round_ in again for key in keys_read("r", progress, node, round_)}
    assert lost <= made
    assert read <= made | survivors
    for name, first in kept.items():
        assert made_by(workflow.node(name), first) & ((read - survivors) | lost), f"{name} goes back for nothing"


def test_an_optional_value_that_was_never_made_is_not_missed() -> None:
    """A sampler may have no state; one that has it needs it again, although all else that was made with it is left."""
    progress = Progress(INPAINT, {"denoise": 2}, {})
    progress.done = {node.name: runs_of(progress, node) for node in INPAINT.nodes}
    lost = [TensorKey("r", "denoise", "latents", 1)]
    left = {*keys_read("r", progress, INPAINT.node("denoise"), 0)} - {TensorKey("r", "image_encode", "sampler", 0)}
    assert "image_encode" not in runs_to_keep("r", progress, lost, left.__contains__, set())
    made = {("image_encode", "sampler")}
    assert runs_to_keep("r", progress, lost, left.__contains__, made)["image_encode"] == 0


@given(workflows(), st.data())
def test_a_request_that_loses_values_at_any_time_makes_the_rest_and_leaves_nothing(
    workflow: Workflow, data: st.DataObject
) -> None:
    """Values that exist are lost, some of several times; the request goes on from what is left and ends with an empty
    table. What was read before is made again only for those that read it again.
    """
    progress, table = progress_of(workflow, data), ValueTable()
    head = in_workflow("0", workflow, list(progress.rounds.values()))
    request = Request(head, workflow, Bindings({MODEL.name: MODEL}).of(head.model, workflow), progress)
    request.id = "r"
    num_losses = data.draw(st.integers(1, 3))
    while ready := progress.ready():
        run_node(progress, data.draw(st.sampled_from(ready)), table)
        if num_losses and data.draw(st.integers(0, 4)) == 0 and table.keys("r"):
            num_losses -= 1
            request.lost += data.draw(st.lists(st.sampled_from(table.keys("r")), min_size=1, unique=True))
            for key in request.lost:
                table.add(TensorRef(key, 1, (1,), "uint8", 1), {1}, 1)  # the only copy is on a rank that dies
            assert sorted(table.lose(1), key=str) == sorted(request.lost, key=str)
            resume(table, request)
            table.check_integrity({"r"})
    assert progress.over == {node.name for node in workflow.nodes}
    assert table.keys("r") == []
