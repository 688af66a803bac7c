"""Requests whose steps ControlNets steer: what is sent to workers, on which components, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isinf
from typing import Any

import msgspec
import pytest
from fakes import MODEL, PIXELS, FakeWorkers, apply, make_edit, make_hires_edit, with_spec
from load_reports import make_report

from core.config import SchedulerConfig
from core.control import Control
from core.control_type import ControlType
from core.costs.cost_model import features_of
from core.costs.load_report import Queued
from core.failure import Failure
from core.graph.catalog import CONTROLLED, WORKFLOWS
from core.graph.work import Work
from core.handles import LoadedComponent, ModelKey
from core.messages.engine import EngineRequest, Failed, Finished
from core.messages.worker import (
    Batch,
    BatchResult,
    CostSample,
    Delivery,
    Item,
    ModelFailed,
    ModelLoaded,
    StepPlan,
    Transfer,
    TransferDone,
)
from core.routing.fleet import Fleet
from core.routing.request_shape import RequestShape
from core.routing.weights import Weights
from core.scheduling.ops.controlnet import ControlStep, ControlUse
from core.scheduling.policies.planner.groups import EFFICIENT
from core.scheduling.policies.planner.predictions import Predictions
from core.scheduling.scheduler import StepScheduler
from core.scheduling.values.values import ValueTable

OWN = tuple(ModelKey("0", kind) for kind in ("text_encoder", "vae", "transformer"))
NETS = {"edges": ModelKey("1", "controlnet"), "depth": ModelKey("2", "controlnet")}
TYPES = {"edges": ControlType("edges"), "deep": ControlType("depth", 3)}
MODELS = {
    name: msgspec.structs.replace(MODEL, name=name, components=OWN, controlnets=NETS, controls=TYPES)
    for name in ("m", "other")
}


def controlled(edit: EngineRequest, *controls: Control, model: str = "m") -> EngineRequest:
    workflow = next(new for old, new in CONTROLLED.items() if old.name == edit.workflow)
    types = tuple(TYPES[each.type] for each in controls)
    pictures = tuple(msgspec.structs.replace(PIXELS, offset=number) for number in range(len(controls)))
    canvases = {
        name: msgspec.structs.replace(canvas, control_pictures=pictures) for name, canvas in edit.spec.canvases.items()
    }
    given = {"controls": controls, "control_types": types, "control_pictures": pictures, "canvases": canvases}
    return msgspec.structs.replace(with_spec(edit, **given), workflow=workflow.name, model=model)


EDGES, DEEP = Control(type="edges", scale=0.5), Control(type="deep", scale=1.0)


class Rig:
    def __init__(self, num_ranks: int = 1, loaded: Sequence[ModelKey] = (*OWN, *NETS.values())) -> None:
        sizes = [LoadedComponent(key, 8) for key in (*OWN, *NETS.values())]
        self.scheduler = StepScheduler(SchedulerConfig(), MODELS, num_ranks, sizes=sizes)
        self.loaded = [LoadedComponent(key, 8) for key in loaded]
        self.scheduler.learn((), [(rank, self.loaded) for rank in range(num_ranks)])
        self.workers, self.batches, self.outputs = FakeWorkers(num_ranks), list[Batch](), list[object]()
        self.seconds: dict[str, float] = {}  # op -> how long its batches take, where that matters
        self.deliveries = list[Delivery]()
        self.transfers = list[Transfer]()
        self.num_together = 0  # steps that were sent while their ControlNets ran

    def run(self, happens: Callable[[], object] = lambda: None) -> None:
        while self.step():
            happens()
            self.outputs += self.scheduler.take_outputs()
        self.outputs += self.scheduler.take_outputs()

    def step(self) -> bool:
        """Schedule all that can be, and have every rank do one plan. Returns whether anything was done."""
        is_active = False
        while (plan := self.scheduler.schedule(0.0)) is not None:
            is_active = True
            self.batches += plan.batches
            self.deliveries += plan.deliveries
            self.transfers += plan.transfers
            running = self.runs(flight.batch for flight in self.scheduler._in_flight.flights)
            steps = {(name, version) for name, node, version in self.runs(plan.batches) if node == "denoise"}
            self.num_together += sum((name, "controlnet", version) in running for name, version in steps)
            self.workers.submit(plan)
        for rank in self.scheduler.ranks.up:
            num_plans = len(self.workers.queues[rank])
            for result in self.workers.run_one(rank):
                apply(self.scheduler, self._timed(result))
            is_active = is_active or len(self.workers.queues[rank]) != num_plans
        return is_active

    def _timed(self, result: BatchResult | TransferDone) -> BatchResult | TransferDone:
        if isinstance(result, TransferDone):
            return result
        op = next(batch.op for batch in self.batches if batch.id == result.batch_id)
        return msgspec.structs.replace(result, seconds=self.seconds.get(op, result.seconds))

    @staticmethod
    def runs(batches: Iterable[Batch]) -> set[tuple[str, str, int]]:
        return {(item.request_id, item.node, item.version) for batch in batches for item in batch.items}

    def sent(self, name: str) -> int:
        """How many values of this name ranks were to send each other."""
        return sum(each.key.name == name for each in self.deliveries)

    def ranks(self, op: str) -> list[int]:
        """Of the last batches of this op, as many as one request has."""
        return [batch.ranks[0] for batch in self.batches if batch.op == op][-4:]

    def works(self, op: str) -> list[Item]:
        return [item for batch in self.batches if batch.op == op for item in batch.items]


def test_each_step_follows_its_controlnets() -> None:
    rig = Rig()
    rig.scheduler.add(controlled(make_edit("a", steps=3), EDGES))
    rig.run()
    order = [(item.node, item.version) for batch in rig.batches for item in batch.items if item.version]
    assert order == [(node, version) for version in (1, 2, 3) for node in ("controlnet", "denoise")]
    (*_, finished) = rig.outputs
    assert isinstance(finished, Finished)
    assert finished.degrees == (1,) * 3, "what works for a step is none itself"
    rig.scheduler.check_integrity()


def test_a_controlnet_gets_the_step_that_it_is_for() -> None:
    rig = Rig()
    rig.scheduler.add(controlled(make_edit("a", steps=2), EDGES))
    rig.run()
    for control, step in zip(rig.works("controlnet"), rig.works("denoise"), strict=True):
        assert isinstance(control.work, ControlStep)
        assert control.work.step == step.work
        assert {ref.input for ref in control.inputs} >= {"controls", "latents", "prompt_embeds"}
        assert "residuals" in {ref.input for ref in step.inputs}


def test_more_pictures_are_more_work() -> None:
    rig = Rig()
    rig.scheduler.add(controlled(make_edit("a", steps=1), EDGES, EDGES))
    rig.scheduler.add(make_edit("b", steps=1))
    works = {request.id: request.work for request in rig.scheduler._requests}
    assert works["a"](WORKFLOWS["controlled_inpaint"].node("control_encode")) == Work.of([256] * 2)
    step = works["a"](WORKFLOWS["controlled_inpaint"].node("denoise"))
    assert works["a"](WORKFLOWS["controlled_inpaint"].node("controlnet")).queries == step.queries * 2
    assert works["b"](WORKFLOWS["inpaint"].node("denoise")) == step


def test_control_pictures_steer_within_their_windows() -> None:
    """As diffusers' pipelines: a step counts if all of it is in the window."""
    rig = Rig()
    window = Control(type="deep", scale=1.0, start=0.25, end=0.75)
    rig.scheduler.add(controlled(make_edit("a", steps=4), EDGES, window, Control(type="edges", scale=0.0)))
    rig.run()
    used = [item.work.uses for item in rig.works("controlnet") if isinstance(item.work, ControlStep)]
    edges, deep = ControlUse("edges", None, 0, 0.5), ControlUse("depth", 3, 1, 1.0)
    left_out = ControlUse("edges", None, 2, 0.0)  # which a ControlNet that sees all of its pictures sees, too
    assert used == [(edges, left_out), (edges, deep, left_out), (edges, deep, left_out), (edges, left_out)]


def test_both_passes_have_controlnets() -> None:
    rig = Rig()
    rig.scheduler.add(controlled(make_hires_edit("a", steps=4, strength=0.5), EDGES))
    rig.run()
    steps = [(i.node, i.work.step.width) for i in rig.works("controlnet") if isinstance(i.work, ControlStep)]
    assert steps == [("first_controlnet", 128)] * 4 + [("controlnet", 256)] * 2
    assert len(rig.works("control_encode")) == 2


def test_requests_share_a_batch_if_they_use_the_same_controlnets() -> None:
    rig = Rig()
    for name, controls, model in (("a", [EDGES], "m"), ("b", [EDGES], "other"), ("c", [DEEP, EDGES], "m")):
        rig.scheduler.add(controlled(make_edit(name, steps=2), *controls, model=model))
    rig.run()
    together = {tuple(sorted(i.request_id for i in each.items)) for each in rig.batches if each.op == "controlnet"}
    assert together == {("a", "b"), ("c",)}
    assert {tuple(sorted(i.request_id for i in each.items)) for each in rig.batches if each.op == "denoise"} == {
        ("a", "b", "c")
    }


def test_a_controlnet_is_loaded_when_a_request_needs_it() -> None:
    rig = Rig(loaded=OWN)
    rig.scheduler.add(make_edit("plain"))
    rig.run()
    assert not rig.workers.loading
    rig.scheduler.add(controlled(make_edit("a"), DEEP))
    rig.run()
    assert rig.workers.loading == [(0, NETS["depth"])]
    for loaded in rig.workers.finish_loads():
        assert isinstance(loaded, ModelLoaded)
        rig.scheduler.apply_load(loaded, 0.0)
    rig.run()
    assert [type(each) for each in rig.outputs] == [Finished, Finished]


def test_one_that_cannot_be_loaded_fails_its_requests_alone() -> None:
    rig = Rig(loaded=OWN)
    for name, controls in (("a", [DEEP]), ("b", [])):
        edit = make_edit(name)
        rig.scheduler.add(controlled(edit, *controls) if controls else edit)
    rig.run()
    broken = Failure("config", "cannot load controlnet: cut short")
    rig.scheduler.apply_load(ModelFailed(0, NETS["depth"], broken), 0.0)
    rig.run()
    ended = {each.request_id: each for each in rig.outputs if isinstance(each, Finished | Failed)}
    assert isinstance(ended["b"], Finished)
    failed = ended["a"]
    assert isinstance(failed, Failed)
    said = "the ControlNet depth of the model {} cannot be loaded: cannot load controlnet: cut short"
    assert failed.failure.message == said.format("m")
    assert rig.scheduler.take_refused() == [f"{said.format(model)} (for 10 s)" for model in MODELS]
    told = [(each.model, each.controlnets, each.cause) for each in rig.scheduler.stats().quarantine]
    assert told == [(model, ("depth",), "load") for model in MODELS]
    assert rig.scheduler.stats().models == dict.fromkeys(MODELS, "loaded")


def answer_loads(rig: Rig, *broken: int) -> None:
    """All ranks have loaded what was ordered, but for these, which cannot."""
    for rank, key in rig.workers.loading:
        is_broken = rank in broken
        failed, loaded = ModelFailed(rank, key, Failure("config", "no memory")), LoadedComponent(key, 8)
        rig.scheduler.apply_load(failed if is_broken else ModelLoaded(rank, loaded, 0.0), 0.0)
    rig.workers.loading.clear()


def with_a_net_on_rank_0() -> Rig:
    """Of two ranks with an edit that waited for it: on the other one its load has failed."""
    rig = Rig(2, OWN)
    rig.scheduler.learn(
        CostSample("m", "denoise", Work.of([280]), 0.05 / degree, degree=degree, is_profile=True) for degree in (1, 2)
    )
    rig.scheduler.add(controlled(make_edit("a"), EDGES))
    while len(rig.workers.loading) < 2:
        rig.step()
    answer_loads(rig, 1)
    return rig


def test_no_rank_computes_with_a_controlnet_that_it_could_not_load() -> None:
    rig = with_a_net_on_rank_0()
    rig.run()
    assert {each.ranks for each in rig.batches if each.op == "controlnet"} == {(0,)}
    assert [type(each) for each in rig.outputs] == [Finished]


def test_a_request_whose_controlnet_is_lost_while_it_is_refused_fails() -> None:
    rig = with_a_net_on_rank_0()
    rig.workers.lose(0)
    rig.scheduler.lose_rank(0, Failure("engine", "died"))
    rig.run()
    (failed,) = rig.outputs
    assert isinstance(failed, Failed)
    assert (failed.failure.kind, failed.failure.code) == ("model_unavailable", "load")


def test_a_controlnet_is_loaded_again_after_a_death_that_may_have_other_causes() -> None:
    rig = Rig(loaded=OWN)
    rig.scheduler.add(make_edit("plain", steps=9))
    while not any(batch.op == "denoise" for batch in rig.batches):
        rig.step()
    rig.scheduler.add(controlled(make_edit("a"), EDGES))
    while not rig.workers.loading:
        rig.step()
    rig.workers.lose(0)
    rig.scheduler.lose_rank(0, Failure("engine", "died"), is_fast=True)
    rig.workers.join(0)
    rig.scheduler.join_rank(0, rig.loaded)
    rig.run()
    assert not rig.works("controlnet")
    answer_loads(rig)
    rig.run()
    assert [type(each) for each in rig.outputs] == [Finished] * 2


def of_four_steps(rig: Rig, *names: str) -> None:
    for name in names:
        rig.scheduler.add(controlled(make_edit(name, steps=4), EDGES))
    rig.run()


@pytest.mark.parametrize("seconds_of_two", [0.09, 0.12])
def test_a_controlnet_runs_beside_its_step_where_that_pays(seconds_of_two: float) -> None:
    """As soon as its time is known. The step is sent to a lane, or to a group if sharing saves nothing, at once."""
    rig = Rig(num_ranks=2)
    rig.seconds = {"controlnet": 0.02, "denoise": 0.06}
    samples = [CostSample("m", "denoise", Work.of([280]), 0.06, is_profile=True)]
    rig.scheduler.learn([*samples, CostSample("m", "denoise", Work.of([280] * 2), seconds_of_two, True)])
    of_four_steps(rig, "a")
    rig.deliveries.clear()
    rig.num_together = 0
    of_four_steps(rig, "b")
    assert rig.num_together == 4
    (home,), (beside,) = map(set, (rig.ranks("denoise"), rig.ranks("controlnet")))
    assert home != beside
    assert rig.sent("residuals") == rig.sent("latents") == 4
    assert rig.sent("prompt_embeds") == 1, "the rank keeps what all rounds read"
    residuals = [ref for item in rig.works("denoise")[-4:] for ref in item.inputs if ref.key.name == "residuals"]
    assert all(ref.is_deferred and ref.rank == beside for ref in residuals)
    rig.scheduler.check_integrity()
    rig.workers.check_is_empty()


def test_one_that_takes_little_runs_where_its_step_does() -> None:
    rig = Rig(num_ranks=2)
    rig.seconds = {"controlnet": 0.003, "denoise": 0.05}
    of_four_steps(rig, "a")
    of_four_steps(rig, "b")
    assert rig.ranks("controlnet") == rig.ranks("denoise")
    assert not rig.deliveries


def test_no_controlnet_is_beside_where_others_make_steps() -> None:
    rig = Rig(num_ranks=2)
    of_four_steps(rig, "a", "b")
    rig.deliveries.clear()
    of_four_steps(rig, "c", "d")
    assert {batch.ranks for batch in rig.batches if batch.op == "denoise"} == {(0,), (1,)}
    assert not rig.deliveries


def test_a_step_whose_controlnets_take_long_is_not_shared_while_others_wait() -> None:
    """It is not known what ranks gain that share them, until both were seen."""

    def efficient_degree(seconds: float) -> int:
        rig = Rig(num_ranks=2)
        rig.seconds = {"controlnet": seconds, "denoise": 0.06}
        samples = [
            CostSample("m", "denoise", Work.of([280] * number), 0.06 * number / degree, True, degree)
            for degree in (1, 2)
            for number in (1, 2)
        ]
        rig.scheduler.learn(samples)
        of_four_steps(rig, "a")
        rig.scheduler.add(controlled(make_edit("b", steps=4), EDGES))
        view, (request,) = rig.scheduler._views.view(0.0), rig.scheduler._requests
        return Predictions().of(view, request).largest_degree(EFFICIENT)

    assert [efficient_degree(seconds) for seconds in (0.0001, 0.03)] == [2, 1]


def test_rounds_of_controlnets_do_not_count_as_steps_of_the_base() -> None:
    """Else one that can be done within its timeout would be given up: four steps of 30 and 5 ms on both ranks."""
    rig = Rig(num_ranks=2)
    rig.seconds = {"controlnet": 0.005, "denoise": 0.06}
    rig.scheduler.learn(
        CostSample("m", "denoise", Work.of([280] * number), 0.06 * number / degree, True, degree)
        for degree in (1, 2)
        for number in (1, 2)
    )
    of_four_steps(rig, "a")
    rig.scheduler.add(msgspec.structs.replace(controlled(make_edit("b", steps=4), EDGES), deadline=0.2))
    rig.run()
    assert [type(each) for each in rig.outputs] == [Finished] * 2


def test_requests_with_controlnets_share_steps_if_all_are_in_time_then() -> None:
    """Four steps of two take 0.36 s, and their ControlNets 0.04 s."""
    rig = Rig()
    rig.seconds = {"controlnet": 0.005, "denoise": 0.06}
    rig.scheduler.learn(
        CostSample("m", "denoise", Work.of([280] * number), 0.03 + 0.03 * number, is_profile=True) for number in (1, 2)
    )
    of_four_steps(rig, "a")
    (*_, step) = (batch for batch in rig.batches if batch.op == "denoise")
    for name in "bc":
        made = controlled(make_edit(name, steps=4), EDGES)
        rig.scheduler.add(msgspec.structs.replace(made, objective=0.5))
    told = [change.load for change in rig.scheduler.load_report().queue if isinstance(change, Queued)]
    assert [load.steps_left for load in told[-2:]] == [4, 4]
    rig.run()
    steps = [batch for batch in rig.batches if batch.op == "denoise" and batch.id > step.id]
    assert [len(batch.items) for batch in steps] == [2] * 4


def test_a_controlnet_beside_needs_no_room_in_the_arena() -> None:
    """What it reads goes from rank to rank."""
    rig = Rig(num_ranks=2)
    of_four_steps(rig, "a")
    rig.scheduler.values._space = ValueTable(0)._space
    rig.deliveries.clear()
    of_four_steps(rig, "b")
    assert [type(each) for each in rig.outputs] == [Finished] * 2
    assert rig.sent("latents") == 4
    assert not rig.transfers
    rig.scheduler.check_integrity()
    rig.workers.check_is_empty()


class Watched:
    """An edit with its ControlNet on rank 1, on a clock. Its first step, on rank 0, has begun at 0 s: it is predicted
    to take 60 ms, its ControlNet 20 ms.
    """

    def __init__(self, **wishes: Any) -> None:
        self.rig = rig = Rig(num_ranks=2)
        rig.seconds = {"controlnet": 0.02, "denoise": 0.06}
        for name in "kn":  # what all takes is known then
            of_four_steps(rig, name)
        rig.scheduler.add(controlled(make_edit("a", steps=4, **wishes), EDGES))
        while not (first := {run for run in self.runs(self.plans(0.0)) if run[0] == "denoise"}):
            for rank in (0, 1):
                self.answer(rank, 0.0, 0.0)
        assert first == {("denoise", 1, (0,))}
        assert not rig.workers.run_one(0), "it has sent what the ControlNet reads"

    def plans(self, now: float) -> list[StepPlan]:
        """All that the scheduler sends now."""
        found = list[StepPlan]()
        while (plan := self.rig.scheduler.schedule(now, again=bool(found))) is not None:
            self.rig.workers.submit(plan)
            found.append(plan)
        return found

    def answer(self, rank: int, started: float, seconds: float) -> None:
        for _ in range(len(self.rig.workers.queues[rank])):
            for result in self.rig.workers.run_one(rank):
                if isinstance(result, BatchResult):
                    result = msgspec.structs.replace(result, started=started, seconds=seconds)
                apply(self.rig.scheduler, result)

    def runs(self, plans: Iterable[StepPlan]) -> set[tuple[str, int, tuple[int, ...]]]:
        """(node, version, ranks)"""
        batches = (batch for plan in plans for batch in plan.batches)
        return {(item.node, item.version, batch.ranks) for batch in batches for item in batch.items}


def test_the_next_round_of_a_controlnet_is_sent_before_the_step_that_it_reads_is_done() -> None:
    """So that it waits for no round trip of the engine: the step's rank sends it the latents. But not so early that its
    rank, where other work may come, would wait for long."""
    watched = Watched()
    scheduler = watched.rig.scheduler
    watched.answer(1, 0.0, 0.02)
    assert not watched.plans(0.02)
    assert scheduler.next_pass == pytest.approx(0.05, abs=0.002)
    plans = watched.plans(scheduler.next_pass)
    assert watched.runs(plans) == {("controlnet", 2, (1,))}
    assert scheduler.load_report().running["a"].ranks == (0,), "of its steps"
    sent = {(each.key.name, each.key.version, each.source, each.target) for each in plans[0].deliveries}
    assert sent == {("latents", 1, 0, 1), ("sampler", 1, 0, 1)}
    assert not watched.rig.workers.run_one(1), "it waits for them"
    watched.answer(0, 0.0, 0.06)
    assert [type(each) for each in watched.rig.workers.run_one(1)] == [BatchResult], "which have come from the rank"
    scheduler.check_integrity()


def test_without_a_pass_in_time_it_is_sent_with_the_answer() -> None:
    watched = Watched()
    watched.answer(1, 0.0, 0.02)
    watched.answer(0, 0.0, 0.03)  # sooner than predicted
    plans = watched.plans(0.03)
    assert watched.runs(plans) == {("controlnet", 2, (1,)), ("denoise", 2, (0,))}
    assert {each.key.name for each in plans[0].deliveries} == {"latents", "sampler"}
    assert not any(plan.transfers for plan in plans), "nothing waits for a copy in shared memory"


def test_while_a_partial_image_is_due_no_controlnet_is_sent_ahead() -> None:
    watched = Watched(partial_images=3)
    watched.answer(1, 0.0, 0.02)
    assert not watched.plans(0.055)
    assert isinf(watched.rig.scheduler.next_pass)


def test_a_step_that_fails_fails_the_controlnet_that_waits_for_it() -> None:
    watched = Watched()
    watched.answer(1, 0.0, 0.02)
    assert watched.plans(0.055)
    watched.rig.workers.fail.add("a")
    watched.answer(0, 0.0, 0.06)
    watched.answer(1, 0.06, 0.02)
    assert not watched.runs(watched.plans(0.08))
    failed = watched.rig.scheduler.take_outputs()[-1]
    assert isinstance(failed, Failed)
    assert failed.failure.message == "told to"
    watched.rig.scheduler.check_integrity()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_request_survives_the_death_of_a_rank_that_was_to_send_latents_or_to_get_them(
    rank: int, *, comes_back: bool
) -> None:
    """The other one may answer before or after it comes back."""
    watched = Watched()
    rig = watched.rig
    watched.answer(1, 0.0, 0.02)
    assert watched.runs(watched.plans(0.055)) == {("controlnet", 2, (1,))}
    rig.workers.lose(rank)
    rig.scheduler.lose_rank(rank, Failure("engine", "died"))
    if comes_back:
        rig.workers.join(rank)
        rig.scheduler.join_rank(rank, rig.loaded)
    watched.answer(1 - rank, 0.0, 0.06)
    rig.scheduler.check_integrity()
    rig.run()
    assert isinstance(rig.outputs[-1], Finished)
    rig.scheduler.check_integrity()
    rig.workers.check_is_empty()


@pytest.mark.parametrize("op", ["controlnet", "denoise"])
@pytest.mark.parametrize("round_", [1, 3])
def test_a_request_survives_the_death_of_either_rank(round_: int, op: str) -> None:
    rig = Rig(num_ranks=2)
    of_four_steps(rig, "known")
    rig.batches.clear()
    rig.scheduler.add(controlled(make_edit("a", steps=4), EDGES))
    dead: list[int] = []

    def die() -> None:
        done = [batch for batch in rig.batches if batch.op == op]
        if len(done) >= round_ and not dead:
            dead.append(done[-1].ranks[0])
            rig.workers.lose(dead[0])
            rig.scheduler.lose_rank(dead[0], Failure("engine", "died"))
            rig.workers.join(dead[0])
            rig.scheduler.join_rank(dead[0], rig.loaded)

    rig.run(die)
    assert dead
    assert isinstance(rig.outputs[-1], Finished)
    assert rig.deliveries
    rig.scheduler.check_integrity()


def test_routing_counts_what_its_controlnets_take() -> None:
    """From what an engine reports as soon as it has seen some: one pass beside each step that they steer, with a row
    for every row of the step and picture."""
    late = Control(type="deep", scale=1.0, start=0.5)
    plain = make_edit("a", steps=4)
    twice, half, free = (
        RequestShape.of_request(each, MODELS["m"])
        for each in (controlled(plain, DEEP, DEEP), controlled(plain, late), controlled(plain, EDGES))
    )
    rig = Rig()
    rig.scheduler.add(controlled(make_edit("b", steps=3), DEEP))
    rig.run()
    costs = rig.scheduler.load_report().costs
    assert costs is not None
    lines = [line for line in costs.lines if line.op == "controlnet"]
    assert {(line.model, line.controlnets) for line in lines} == {(name, ("depth",)) for name in MODELS}
    fleet = Fleet(1, 8)
    fleet.observe(0, make_report(costs=costs), 0.0)
    own, tokens = fleet.step_seconds(RequestShape.of_request(plain, MODELS["m"])), plain.spec.num_all_tokens

    def pass_of(num_rows: int) -> float:
        features = features_of(Work.of([tokens] * num_rows))
        return sum(by * each for by, each in zip(lines[0].coefficients, features, strict=True))

    assert pass_of(2) > pass_of(1) > 0
    beside = [fleet.step_seconds(shape) - own for shape in (twice, half, free)]
    assert beside == pytest.approx([pass_of(2), pass_of(1) / 2, 0.0])
    assert twice.num_steps == 4, "what works for a step is none itself"


def test_routing_counts_what_loading_its_controlnets_takes() -> None:
    """An engine that has them is as much nearer."""
    shape = RequestShape.of_request(controlled(make_edit("a"), DEEP), MODELS["m"])
    assert shape.needed == (Weights("m"), Weights("m", "controlnet", "depth"))
    fleet = Fleet(2, 8)
    for engine, loaded in enumerate((OWN, (*OWN, NETS["depth"]))):
        fleet.observe(engine, Rig(loaded=loaded).scheduler.load_report(), 0.0)
    wait = fleet.load_wait(shape, 0.0)
    assert wait is not None
    assert wait.seconds[0] > wait.seconds[1] == 0.0
    assert fleet.load_wait(RequestShape.of_request(make_edit("b"), MODELS["m"]), 0.0) is None


def test_every_workflow_with_prompts_has_one_with_controlnets() -> None:
    assert {old.name: new.name for old, new in CONTROLLED.items()} == {
        name: f"controlled_{name}" for name in ("inpaint", "hires", "refined")
    }
    for workflow in CONTROLLED.values():
        assert workflow is WORKFLOWS[workflow.name]
        assert len(workflow.counted_steps) == len([node for node in workflow.nodes if node.op == "denoise"])
