"""The value table: readers, moves and frees; and which nodes run again when values are lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.graph.workflow import INPAINT, Edge, Node, Workflow
from core.handles import VALUE_ARENA, TensorKey, TensorRef
from core.scheduling.lineage import Invocation, invocations_to_repeat
from core.scheduling.value_keys import keys_done, keys_read
from core.scheduling.values import ValueTable


def ref(name: str, *, request: str = "r", version: int = 0, rank: int = 0, nbytes: int = 100) -> TensorRef:
    return TensorRef(TensorKey(request, "node", name, version), rank, (nbytes,), "uint8", nbytes)


def test_a_value_is_freed_when_its_last_reader_is_done() -> None:
    table, value = ValueTable(), ref("latents")
    table.add(value, readers=2)
    table.done_reading(value.key)
    assert table.take_freed() == []
    table.done_reading(value.key)
    assert table.take_freed() == [value.key]
    assert table.get(value.key) is None
    table.done_reading(value.key)
    assert table.take_freed() == [], "it was never made, or is gone"


def test_a_value_that_is_made_again_replaces_the_only_one_of_its_request() -> None:
    table, value = ValueTable(), ref("latents")
    table.add(value, readers=1)
    table.add(value, readers=2)
    found = table.get(value.key)
    assert found is not None
    assert found.readers_left == 2
    table.check_integrity({"r"})


def test_a_value_that_no_node_reads_is_freed_at_once() -> None:
    table, value = ValueTable(), ref("unread")
    table.add(value, readers=0)
    assert table.take_freed() == [value.key]


def test_several_values_of_a_request_move_at_once_and_none_overlap() -> None:
    table, values = ValueTable(), [ref("a", nbytes=100), ref("b", nbytes=5000), ref("c", rank=1, nbytes=70_000)]
    for value in values:
        table.add(value, readers=1)
    transfers = table.move([value.key for value in values])
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
    assert table.move([values[0].key]) == [], "it is on its way"
    for value in values:
        table.end_move(value.key)
        assert table.get(value.key).exported is not None  # type: ignore[union-attr]
    assert table.num_moving == 0
    table.check_integrity({"r"})


def test_values_that_do_not_fit_wait_and_take_no_space() -> None:
    table = ValueTable(num_bytes=256)
    for name in ("a", "b", "c"):
        table.add(ref(name, nbytes=100), readers=1)
    assert table.move([ref("a").key]) is not None
    assert table.move([ref("b").key, ref("c").key]) is None
    table.check_integrity({"r"})
    table.end_move(ref("a").key)
    table.done_reading(ref("a").key)
    moved = table.move([ref("b").key, ref("c").key])
    assert moved is not None
    assert len(moved) == 2


def test_a_request_that_ends_leaves_no_values() -> None:
    table = ValueTable()
    table.add(ref("a"), readers=1)
    table.add(ref("a", request="s"), readers=1)
    table.move([ref("a").key])
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
            table.add(value, count)
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
            moving |= {transfer.ref.key for transfer in table.move(keys) or ()}
        elif choice == "read" and (free := sorted(readers.keys() - moving, key=str)):
            key = data.draw(st.sampled_from(free))
            table.done_reading(key)
            readers[key] -= 1
            if not readers[key]:
                del readers[key]
                assert key in table.take_freed()
        table.check_integrity("abc")
        assert {key for request in "abc" for key in table.keys(request)} == set(readers)
        assert table.num_moving == len(moving)
    for key in moving:
        table.end_move(key)
    for request in "abc":
        table.forget(request)
    table.check_integrity(())


# ------------------------------------------------------------------------------------------------------ of workflows


def run_whole(workflow: Workflow, outputs: dict[str, tuple[str, ...]], num_rounds: int) -> ValueTable:
    """Run every node of a request, the loop round by round, and keep the table's books."""
    table = ValueTable()
    for node in workflow.nodes:
        for done in range(num_rounds) if node.kind == "loop" else [num_rounds]:
            for key in keys_read("r", workflow, node, done):
                assert table.get(key) is not None, f"{node.name} reads {key}, which is freed"
            version = done + 1 if node.kind == "loop" else 0
            for name in outputs[node.name]:
                readers = workflow.readers(with_sides=False).get((node.name, name, done + 1 >= num_rounds), 0)
                table.add(TensorRef(TensorKey("r", node.name, name, version), 0, (1,), "uint8", 1), readers)
            is_last = node.kind != "loop" or done + 1 == num_rounds
            for key in keys_done("r", workflow, node, done, is_last=is_last):
                table.done_reading(key)
            table.check_integrity({"r"})
    return table


@st.composite
def workflows(draw: st.DrawFn) -> tuple[Workflow, dict[str, tuple[str, ...]]]:
    """A random graph: nodes before a loop, the loop, nodes after it; and what each makes."""
    before = [f"before{i}" for i in range(draw(st.integers(1, 3)))]
    outputs = dict.fromkeys(before, ("x", "y"))
    nodes: list[Node] = []
    for i, name in enumerate(before):
        nodes.append(Node(name, "text_encode", tuple(_edges(draw, before[:i]))))
    carried = draw(st.sampled_from(before))
    constants = [edge for edge in _edges(draw, before) if (edge.source, edge.name) != (carried, "x")]
    nodes.append(Node("loop", "denoise", (Edge(carried, "x", is_carried=True), *constants), kind="loop"))
    outputs["loop"] = ("x", "clean")
    after: list[str] = []
    for i in range(draw(st.integers(1, 3))):
        reads = [Edge(carried, "x")] if draw(st.booleans()) or not i else []
        reads += [edge for edge in _edges(draw, before + after) if (edge.source, edge.name) != (carried, "x")]
        reads += [Edge("loop", "clean")] if draw(st.booleans()) else []
        nodes.append(Node(f"after{i}", "decode", tuple(reads)))
        outputs[f"after{i}"] = ("x", "y")
        after.append(f"after{i}")
    return Workflow("random", tuple(nodes), output=after[-1]), outputs


def _edges(draw: st.DrawFn, sources: list[str]) -> list[Edge]:
    pairs = [(source, name) for source in sources for name in ("x", "y")]
    return [Edge(*pair) for pair in draw(st.lists(st.sampled_from(pairs), max_size=3, unique=True))] if pairs else []


@given(workflows(), st.integers(1, 5))
def test_every_value_lives_exactly_until_its_last_reader(
    drawn: tuple[Workflow, dict[str, tuple[str, ...]]], num_rounds: int
) -> None:
    workflow, outputs = drawn
    assert run_whole(workflow, outputs, num_rounds).keys("r") == []


def test_the_values_of_an_edit_live_until_their_last_reader() -> None:
    outputs = {
        "text_encode": ("prompt_embeds", "text_lengths", "pooled_prompt_embeds"),
        "image_encode": ("latents", "condition", "outside", "sigmas", "sampler"),
        "denoise": ("latents", "sampler"),
        "decode": (),
    }
    workflow = Workflow("inpaint", tuple(node for node in INPAINT.nodes if node.kind != "side"), "decode")
    assert run_whole(workflow, outputs, 8).keys("r") == []


@given(workflows(), st.integers(1, 5), st.data())
def test_lost_values_are_made_again_from_what_survives(
    drawn: tuple[Workflow, dict[str, tuple[str, ...]]], num_rounds: int, data: st.DataObject
) -> None:
    """Whatever is lost: each invocation finds its inputs, all that is wanted is made, and nothing runs for nothing."""
    workflow, outputs = drawn
    every = [
        TensorKey("r", node.name, name, version)
        for node in workflow.nodes
        for name in outputs[node.name]
        for version in (range(1, num_rounds + 1) if node.kind == "loop" else (0,))
    ]
    survivors = set(data.draw(st.lists(st.sampled_from(every), unique=True)))
    wanted = data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True))
    again = invocations_to_repeat("r", workflow, num_rounds, wanted, survivors.__contains__)
    there, read = set(survivors), set(wanted)
    for invocation in again:
        inputs = keys_read("r", workflow, workflow.node(invocation.node), invocation.rounds)
        assert there >= set(inputs)
        there |= made_by(workflow, outputs, invocation)
        read |= set(inputs)
    assert there >= set(wanted)
    assert len(set(again)) == len(again)
    for invocation in again:
        assert made_by(workflow, outputs, invocation) & (read - survivors), "it makes nothing that is missing"


def made_by(workflow: Workflow, outputs: dict[str, tuple[str, ...]], invocation: Invocation) -> set[TensorKey]:
    version = invocation.rounds + 1 if workflow.node(invocation.node).kind == "loop" else 0
    return {TensorKey("r", invocation.node, name, version) for name in outputs[invocation.node]}
