"""The policy lego decides as LegoDiffusion's algorithm 1 does: on LegoDiffusion's workflows, in simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from random import Random
from typing import NamedTuple

import msgspec
import pytest

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.engine import SimulatedEngine
from benchmarks.simulation.lego.numbers import Numbers, Workflow
from benchmarks.simulation.lego.serving import OneSided, WorkflowDurations
from benchmarks.simulation.lego.site import Site
from benchmarks.simulation.model_ranks import ModelRanks, Poison
from core.config import SchedulerConfig
from core.costs.cost_model import CostModel
from core.handles import LoadedComponent, ModelKey, RankIds
from core.messages.engine import Failed, Finished, Output
from core.messages.worker import Batch, ItemResult
from core.scheduling.policies import make_policy

NUMBERS = msgspec.structs.replace(Numbers.read(), most_rounds=2, node_seconds=1e-4)
SD3, SD35 = Workflow("sd3", 0), Workflow("sd35l", 0)
ALONE = NUMBERS.alone_seconds(SD3)


class Ran(NamedTuple):
    """A batch, when it ended."""

    seconds: float
    op: str
    ranks: RankIds
    requests: tuple[str, ...]


class Rig(ModelRanks):
    """Some ranks with the policy, that note their batches. started: what each has at first; by default everything."""

    def __init__(
        self,
        site: Site,
        started: Sequence[Sequence[ModelKey]] | None = None,
        *,
        budget: int = 0,
        max_num_seqs: int = 64,
        max_degree: int = 2,
    ) -> None:
        infos, sizes = site.infos("node"), site.sizes("node")
        super().__init__(site.num_ranks, infos, sizes, budget, Poison(), 0.0, Random(0))
        self.site, self.clock, self.ran, self.outputs = site, Clock(), list[Ran](), list[Output]()
        self.workflows: dict[str, Workflow] = {}
        cost, config = (
            CostModel(),
            SchedulerConfig(max_num_seqs=max_num_seqs, max_degree=max_degree, model_bytes=budget),
        )
        self.scheduler = OneSided(
            config,
            infos,
            site.num_ranks,
            cost=cost,
            policy=make_policy("lego"),
            sizes=[LoadedComponent(key, nbytes) for key, nbytes in sizes.items()],
        )
        site.teach(cost, "node")
        keys = started or [tuple(sizes)] * site.num_ranks
        self.scheduler.learn((), [(rank, self.memory.start(rank, keys[rank])) for rank in range(site.num_ranks)])
        durations = WorkflowDurations(site.numbers, self.workflows, sizes, 0.0, 0)
        self.engine = SimulatedEngine(self.clock, self.scheduler, durations, self.outputs.extend, self)

    def run(self, batch: Batch, rank: int) -> tuple[ItemResult, ...]:
        if rank == batch.ranks[0]:
            names = tuple(item.request_id for item in batch.items)
            self.ran.append(Ran(self.clock.now, batch.op, batch.ranks, names))
        return super().run(batch, rank)

    def serve(self, *requests: tuple[float, Workflow]) -> None:
        """(when, workflow): named "0", "1", ..; until all have ended."""
        for index, (seconds, workflow) in enumerate(requests):
            self.workflows[str(index)] = workflow
            self.clock.at(seconds, partial(self.engine.add, self.site.request(index, seconds, workflow, "node")))
        self.clock.run()
        assert not self.scheduler.num_requests
        self.scheduler.check_integrity()

    def of(self, op: str) -> list[Ran]:
        """The batches of an op, in the order in which they ended."""
        return [each for each in self.ran if each.op == op]

    @property
    def finished(self) -> set[str]:
        return {each.request_id for each in self.outputs if isinstance(each, Finished)}


def site(num_ranks: int, setting: str = "S1", numbers: Numbers = NUMBERS, slo_scale: float = inf) -> Site:
    return Site(numbers, setting, num_ranks, slo_scale)


def keys(workflow: Workflow) -> tuple[ModelKey, ...]:
    return site(1, "S5").keys(workflow, "node")


def test_nodes_go_by_arrival_and_those_of_one_request_in_the_order_of_its_workflow() -> None:
    rig = Rig(site(1))
    rig.serve((0.0, SD3), (0.01, SD3), (0.02, Workflow("sd3", 1)))
    order = [(each.requests, each.op) for each in rig.ran]
    steps = ["text_encode", "image_encode", "denoise", "denoise", "decode"]
    assert order[:5] == [(("0",), op) for op in steps]
    assert order[5:10] == [(("1",), op) for op in steps]
    assert [op for _, op in order[10:]] == [
        *("text_encode", "image_encode", "control_encode"),
        *("controlnet", "denoise") * 2,
        "decode",
    ]


def test_a_batch_has_ready_nodes_of_one_model_whatever_workflows_they_are_of() -> None:
    numbers = msgspec.structs.replace(NUMBERS, batch_slope=0.2)
    bases = Rig(site(2, "S5", numbers))
    bases.serve((0.0, SD3), (1.0, SD3), (1.0, SD35), (1.0, SD3))
    assert ("1", "2", "3") in {each.requests for each in bases.of("text_encode")}, "these share text encoders"
    assert ("1", "3") in {each.requests for each in bases.of("denoise")}
    alone = Rig(site(2, "S5"))
    alone.serve((0.0, SD3), (1.0, SD3), (1.0, SD35), (1.0, SD3))
    assert {len(each.requests) for each in alone.ran} == {1}, "a batch that saves little"


def test_a_node_goes_to_a_free_rank_with_its_model_and_else_a_free_one_loads_that() -> None:
    others = [key for key in keys(SD3) if key.component != "transformer"]
    rig = Rig(site(2), [others, keys(SD3)], budget=NUMBERS_BUDGET, max_degree=1)
    rig.serve((0.0, SD3), (1.0, SD3))
    assert {(each.requests, each.ranks) for each in rig.of("denoise")} == {(("0",), (1,)), (("1",), (0,))}
    assert [each.key for each in rig.loaded] == [ModelKey("sd3", "transformer")]


def test_as_many_free_ranks_as_are_useful_share_a_step() -> None:
    rig = Rig(site(4))
    rig.serve((0.0, SD3))
    assert {each.ranks for each in rig.of("denoise")} == {(0, 1)}
    assert rig.ran[-1].seconds == pytest.approx(ALONE - 3.0 * (1 - 1 / NUMBERS.speed_of_two), abs=0.01)
    crowd = Rig(site(2))
    crowd.serve((0.0, SD3), (0.0, SD3))
    assert {each.ranks for each in crowd.of("denoise")} == {(0,), (1,)}


def test_a_controlnet_runs_beside_its_step() -> None:
    rig = Rig(site(2))
    rig.serve((0.0, Workflow("sd3", 1)))
    for net, step in zip(rig.of("controlnet"), rig.of("denoise"), strict=True):
        assert set(net.ranks).isdisjoint(step.ranks)
    assert rig.ran[-1].seconds == pytest.approx(ALONE, abs=0.01)


def test_a_request_is_rejected_that_would_be_late_after_those_before_it() -> None:
    """One rank, objectives of twice what a request takes alone: the third would end after three times that. The fourth
    comes when there is room again.
    """
    rig = Rig(site(1, slo_scale=2.05))
    rig.serve((0.0, SD3), (0.0, SD3), (0.0, SD3), (1.2 * ALONE, SD3))
    assert rig.finished == {"0", "1", "3"}
    rejected = [each for each in rig.outputs if isinstance(each, Failed)]
    assert [(each.request_id, each.failure.kind) for each in rejected] == [("2", "overloaded")]


@pytest.mark.parametrize(("slo_scale", "is_admitted"), [(0.7, True), (0.6, False)])
def test_a_lone_request_is_admitted_if_as_many_ranks_as_are_useful_are_fast_enough(
    slo_scale: float, is_admitted: bool
) -> None:
    """Of 4.0 s on one rank, the 3.0 s of steps take 1.6 s on two."""
    rig = Rig(site(4, slo_scale=slo_scale))
    rig.serve((0.0, Workflow("sd3", 1)))
    assert rig.finished == ({"0"} if is_admitted else set())


NUMBERS_BUDGET = sum(Site(NUMBERS, "S5", 1).sizes("node")[key] for key in keys(SD35))
"""Bytes for one of the larger base models with all that it needs."""


def test_what_was_used_least_recently_makes_room() -> None:
    """A rank for one of two base models: each takes turns, and what they share stays."""
    rig = Rig(site(1, "S5"), [keys(SD3)], budget=NUMBERS_BUDGET)
    rig.serve((0.0, SD3), (5.0, SD35), (30.0, SD3))
    assert [each.key.content for each in rig.loaded] == ["sd35l", "sd3"]
    assert rig.finished == {"0", "1", "2"}


def test_a_batch_whose_rank_dies_as_it_loads_gets_another_rank() -> None:
    rig = Rig(replace(site(2, "S5"), num_ranks=2), [keys(SD3), keys(SD3)], budget=NUMBERS_BUDGET)

    def die() -> None:
        assert rig.scheduler.load_report() is not None
        rig.memory.lose(0)
        rig.engine._lose(0)
        rig.engine.step()

    rig.clock.at(0.5, die)
    rig.serve((0.0, SD35), (0.1, SD3))
    assert rig.finished == {"0", "1"}
    assert {each.ranks for each in rig.of("denoise") if each.requests == ("0",)} <= {(1,), (0,), (0, 1)}


def test_no_more_requests_begin_than_there_are_slots() -> None:
    rig = Rig(site(4), max_num_seqs=1)
    rig.serve((0.0, SD3), (0.0, SD3))
    begun = [each.seconds for each in rig.ran if each.requests == ("1",)]
    ended = [each.seconds for each in rig.ran if each.requests == ("0",)]
    assert min(begun) > max(ended)
