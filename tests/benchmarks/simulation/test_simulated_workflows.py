"""The simulator: any workflow on any ranks ends with what it makes alone, and times are exactly what they must be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import pytest
from any_ranks import AnyRanks, answer_of, in_workflow, toy_op
from fakes import MODEL, FakeWorkers, make_hires_edit
from workflows import ACCEPTANCE

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.durations import Latencies, TableDurations
from benchmarks.simulation.engine import Ranks, SimulatedEngine
from benchmarks.simulation.ranks import BatchEnded, RankClocks
from core.config import SchedulerConfig
from core.graph.workflow import Edge, Node, Workflow
from core.graph.workflows.hires import HIRES
from core.graph.workflows.inpaint import INPAINT
from core.handles import ModelKey
from core.messages.engine import EngineRequest, Finished, Output, PartialImage
from core.messages.worker import Batch, Item, ItemResult, StepPlan, Transfer
from core.scheduling.dispatch import Decision, Dispatch, Fetch
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.scheduler import StepScheduler
from core.scheduling.view import View

OPS_OF_ALL = ("toy", "text_encode", "image_encode", "denoise", "upscale", "decode")
TABLE = Latencies({(op, degree): {1: 1.0 / degree, 4: 2.0 / degree} for op in OPS_OF_ALL for degree in (1, 2, 3)})


@pytest.fixture(autouse=True, scope="module")
def toy() -> Iterator[None]:
    with toy_op():
        yield


class CheckedRanks(Ranks):
    """Ranks that compute digests, and check that all they read is there."""

    def __init__(self, fakes: FakeWorkers) -> None:
        self._fakes = fakes

    def begin(self, part: StepPlan, rank: int) -> None:
        self._fakes.begin(part, rank)

    def run(self, batch: Batch, rank: int) -> tuple[ItemResult, ...]:
        assert self._fakes.has_deferred(batch, rank), "a batch ends before all of its inputs are there"
        return self._fakes.run(batch, rank).items

    def export(self, transfer: Transfer) -> None:
        self._fakes.export(transfer)


class Site:
    """A simulated engine that serves ACCEPTANCE, INPAINT and HIRES on some ranks."""

    def __init__(self, seed: int, num_ranks: int) -> None:
        self.clock, self.outputs = Clock(), list[Output]()
        config = SchedulerConfig(max_num_seqs=8, max_ahead_ms=1e6, max_plans_in_flight=3)
        self.scheduler = StepScheduler(config, {"m": MODEL}, num_ranks, policy=AnyRanks(Random(seed)))
        self.scheduler.workflows[ACCEPTANCE.name] = ACCEPTANCE
        self.fakes = FakeWorkers(num_ranks, omitted={"sampler"}, answers=self._answer)
        durations = TableDurations(TABLE, transfer=0.3, delivery=0.2)
        self.engine = SimulatedEngine(
            self.clock, self.scheduler, durations, self.outputs.extend, CheckedRanks(self.fakes)
        )

    def _answer(self, item: Item) -> dict[str, object]:
        return answer_of(item)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort([request_id])
        self.engine.step()

    def run(self) -> None:
        for _ in range(1000):  # where all ranks are idle, the policy may draw ranks on which nothing can run
            self.clock.run()
            if not self.scheduler.num_requests:
                break
            self.engine.step()
        self.scheduler.check_integrity()
        self.fakes.check_is_empty()

    def made(self, request: EngineRequest) -> int:
        """A digest of all that a request's output was made from."""
        return self.fakes.made[request.request_id, self.scheduler.workflows[request.workflow].last_output.name]


def alone(request: EngineRequest) -> int:
    """What the request makes on one rank, by itself."""
    site = Site(0, 1)
    site.engine.add(request)
    site.run()
    assert isinstance(site.outputs[-1], Finished)
    return site.made(request)


def test_two_hundred_requests_with_aborts_on_three_ranks() -> None:
    random, site, requests = Random(7), Site(8, 3), list[EngineRequest]()
    for index in range(200):
        kind = INPAINT if random.random() < 0.4 else ACCEPTANCE
        request = in_workflow(str(index), kind, [random.randint(1, 5) for _ in kind.regions], random.choice([0, 0, 2]))
        requests.append(request)
        arrival = random.uniform(0.0, 1000.0)
        site.clock.at(arrival, lambda request=request: site.engine.add(request))  # type: ignore[misc]
        if random.random() < 0.1:
            leaves = arrival + random.uniform(0.0, 30.0)
            site.clock.at(leaves, lambda name=str(index): site.abort(name))  # type: ignore[misc]
    site.run()
    terminal = [output.request_id for output in site.outputs if not isinstance(output, PartialImage)]
    assert sorted(terminal, key=int) == [request.request_id for request in requests]
    finished = {output.request_id for output in site.outputs if isinstance(output, Finished)}
    assert 170 < len(finished) < 200
    for request in requests:
        if request.request_id in finished:
            assert site.made(request) == alone(request)
    assert all(busy <= site.clock.now + 1e-9 for busy in site.engine.clocks.busy_seconds)


def test_two_passes_are_simulated_too() -> None:
    site = Site(3, 2)
    for index in range(6):
        site.engine.add(make_hires_edit(str(index)))
    site.run()
    assert {type(output) for output in site.outputs} == {Finished}
    assert site.scheduler.workflows[HIRES.name].last_output.name == "decode"
    assert len(site.outputs) == 6


# ------------------------------------------------------------------------------------------------- times by hand

SMALL = Workflow(
    "small",
    (
        Node("a", "toy"),
        Node("wide", "toy", (Edge("a", "x", "in0"),)),
        Node("control", "toy", (Edge("wide", "x", "in0"),)),
        Node("main", "toy", (Edge("wide", "x", "in0"), Edge("control", "x", "in1", deferred=True))),
        Node("end", "toy", (Edge("main", "x", "in0"),)),
    ),
    {"picture": "end"},
)
PLACES = {"a": (0,), "wide": (0, 1), "control": (0,), "main": (1,), "end": (1,)}
BY_HAND = {"a": 2.0, "wide": 3.0, "control": 7.0, "main": 1.0, "end": 4.0}


class Placed(SchedulingPolicy):
    """Runs every node of SMALL on the ranks of PLACES, alone, as soon as it can."""

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        decisions = list[Decision]()
        for request in view.requests.live():
            for node in view.ready(request):
                ranks = PLACES[node.name]
                if view.can_run(request, node, ranks):
                    decisions.append(Dispatch(((request, node),), ranks))
                elif view.can_fetch(request, node, ranks):
                    decisions.append(Fetch(request, node, ranks))
        return decisions


def test_a_small_case_takes_exactly_as_long_as_by_hand() -> None:
    """Rank 0: a from 0 to 2, its value to shared memory until 2.5; both: wide from 2.5 to 5.5; rank 0: control until
    12.5; rank 1: main from 5.5, which would end at 6.5 but gets control's value at 12.75, then end until 16.75.
    """
    clock, ends = Clock(), list[tuple[float, Output]]()
    scheduler = StepScheduler(SchedulerConfig(), {"m": MODEL}, 2, policy=Placed())
    scheduler.workflows[SMALL.name] = SMALL
    table = Latencies({(name, len(PLACES[name])): {1: seconds} for name, seconds in BY_HAND.items()})
    durations = TableDurations(table, kind=lambda batch, work: batch.items[0].node, transfer=0.5, delivery=0.25)
    engine = SimulatedEngine(clock, scheduler, durations, lambda told: ends.extend((clock.now, each) for each in told))
    engine.add(in_workflow("0", SMALL, []))
    clock.run()
    assert [(when, type(output)) for when, output in ends] == [(16.75, Finished)]
    assert engine.clocks.busy_seconds == [2.0 + 3.0 + 7.0, 3.0 + 7.25 + 4.0]
    scheduler.check_integrity()


def no_load(key: ModelKey, rank: int) -> float:
    raise AssertionError("nothing is to be loaded")


def test_ranks_run_their_plans_in_order_and_wait_for_each_other() -> None:
    """The third batch runs on an idle rank, but comes after one that waits for the other rank."""
    clocks, seconds = RankClocks(2, TableDurations(TABLE)), {0: 5.0, 1: 2.0, 2: 1.0}
    batches = [Batch(number, "toy", ranks, ()) for number, ranks in enumerate([(0,), (0, 1), (1,)])]
    ends = [
        (event.batch.id, event.started, event.when)
        for seq, batch in enumerate(batches)
        for event in clocks.submit(
            StepPlan(seq, batches=(batch,)), lambda batch: seconds[batch.id], no_load, 10.0 + seq
        )
        if isinstance(event, BatchEnded)
    ]
    assert ends == [(0, 10.0, 15.0), (1, 15.0, 17.0), (2, 17.0, 18.0)]
    assert clocks.busy_seconds == [7.0, 3.0]


def test_a_table_is_linear_between_its_sizes() -> None:
    table = Latencies({("step", 1): {1: 1.0, 2: 1.5, 4: 3.5}, ("step", 2): {512: 2.0}})
    assert [table.seconds("step", 1, size) for size in (0.5, 1, 1.5, 3, 4, 6)] == [1.0, 1.0, 1.25, 2.5, 3.5, 5.5]
    assert table.seconds("step", 2, 1024) == 4.0
    with pytest.raises(KeyError):
        table.seconds("step", 4, 1)
    with pytest.raises(ValueError, match="sizes above 0"):
        Latencies({("step", 1): {}})
