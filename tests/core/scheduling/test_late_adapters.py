"""Requests whose adapters are still loading when they come: which of their steps run without, and that this is
repeated."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from fakes import PIXELS, make_edit, make_hires_edit, with_spec
from ranks_that_die import Site, checkpoints_every, run_until

from core.graph.progress import Progress
from core.graph.work import Work
from core.graph.workflow import Node, Region
from core.graph.workflows.inpaint import INPAINT
from core.handles import Artefact
from core.late_adapters import LateAdapters
from core.messages.engine import AdaptersUsed, EngineRequest, Failed, Finished, PartialImage, UseAdapters
from core.messages.worker import Batch, CostSample, StepPlan
from core.patches import Patch
from core.scheduling.ops.denoise import Denoise
from core.scheduling.ops.text_encode import TextEncode
from core.scheduling.policies.planner.default import Default
from core.scheduling.requests.bindings import Binding
from core.scheduling.requests.request import Request

HAT = (Patch("hat", 0.5),)


def late(request: EngineRequest, most: int) -> EngineRequest:
    return with_spec(request, late=LateAdapters(most))


class Adapted(Site):
    """A site on which `load` loads the adapter, and that notes what is sent to its workers."""

    def __init__(self, num_ranks: int = 1, **limits: int) -> None:
        super().__init__(Random(0), num_ranks, Default(), **limits)
        self.batches = list[Batch]()
        submit = self.workers.submit

        def note(plan: StepPlan) -> None:
            self.batches += plan.batches
            submit(plan)

        self.workers.submit = note  # type: ignore[method-assign]

    def load(self, name: str = "a") -> None:
        self.scheduler.use_adapters(UseAdapters(request_id=name, patches=HAT))

    def stand_still(self) -> None:
        """Run until nothing happens any more."""
        for _ in range(40):
            self.step()

    @property
    def steps(self) -> list[tuple[str, int, bool]]:
        """Node, step, whether it has the adapter, of each that was sent."""
        items = [(item.node, item.work) for batch in self.batches for item in batch.items]
        return [(node, work.step, work.patches == HAT) for node, work in items if isinstance(work, Denoise)]

    @property
    def texts(self) -> list[bool]:
        """Whether prompts were encoded with it."""
        works = [item.work for batch in self.batches for item in batch.items]
        return [work.patches == HAT for work in works if isinstance(work, TextEncode)]

    @property
    def told(self) -> list[int]:
        return [output.step for output in self.outputs if isinstance(output, AdaptersUsed)]

    @property
    def finished(self) -> Finished:
        assert isinstance(self.outputs[-1], Finished)
        return self.outputs[-1]


def test_first_steps_run_without_and_then_it_is_waited_for() -> None:
    site = Adapted()
    site.scheduler.add(late(make_edit("a", steps=5), most=2))
    site.stand_still()
    assert site.steps == [("denoise", 0, False), ("denoise", 1, False)]
    assert site.told == []
    site.load()
    site.finish()
    assert [has_it for _, _, has_it in site.steps] == [False, False, True, True, True]
    assert site.texts == [False]
    assert (site.told, site.finished.steps_without_lora) == ([2], 2)


def test_it_is_used_from_the_next_step_on() -> None:
    site = Adapted()
    site.scheduler.add(late(make_edit("a", steps=9), most=8))
    run_until(site, lambda: len(site.steps) == 4)
    site.load()
    site.load()  # it may be told twice, where an engine has died meanwhile
    site.finish()
    assert [has_it for _, _, has_it in site.steps] == [False] * 4 + [True] * 5
    assert (site.finished.steps_without_lora, {*site.told}) == (4, {4})


def test_all_has_it_if_it_is_there_before_anything_begins() -> None:
    site = Adapted()
    site.scheduler.add(late(make_edit("a"), most=2))
    site.load()
    site.finish()
    ordinary = Adapted()
    ordinary.scheduler.add(with_spec(make_edit("a"), patches=HAT))
    ordinary.finish()
    assert site.finished.steps_without_lora == 0
    assert ordinary.finished.steps_without_lora is None
    assert (site.steps, site.texts) == (ordinary.steps, ordinary.texts)
    assert all(has_it for _, _, has_it in site.steps)


@pytest.mark.parametrize("steps", [1, 4])
def test_no_request_ends_without(steps: int) -> None:
    """Of one that has a single step, nothing begins before."""
    site = Adapted()
    site.scheduler.add(late(make_edit("a", steps=steps), most=200))
    site.stand_still()
    assert len(site.steps) == steps - 1
    assert len(site.texts) == (steps > 1)
    site.load()
    site.finish()
    assert site.finished.steps_without_lora == steps - 1


def test_steps_of_all_loops_are_counted() -> None:
    site = Adapted()
    request = late(make_hires_edit("a", steps=4, previews=(Artefact(PIXELS),)), most=5)
    site.scheduler.add(request)
    site.stand_still()
    first, second = request.rounds
    assert len(site.steps) == 5 == first + 1
    assert [output.step for output in site.outputs if isinstance(output, PartialImage)] == [5], "the router repeats it"
    site.load()
    site.finish()
    assert [has_it for _, _, has_it in site.steps] == [False] * 5 + [True] * (second - 1)


@pytest.mark.parametrize("seed", range(12))
def test_deaths_of_ranks_change_no_step(seed: int) -> None:
    """Whether they die before it is loaded or later: what has run without is run without again."""
    with checkpoints_every(2):
        random, site = Random(seed), Adapted(2)
        request = late(make_edit("a", steps=12), most=9)
        site.scheduler.add(request)
        turns = random.randint(0, 40)
        for turn in range(60):
            if turn == turns:
                site.load()
            site.step()
            if random.random() < 0.1 and site.scheduler.ranks.up:
                site.kill(random.choice(site.scheduler.ranks.up))
            elif site.workers.dead and random.random() < 0.3:
                site.join(min(site.workers.dead))
        site.finish()
    (without,) = site.told
    assert site.finished.steps_without_lora == without
    assert {(step, has_it) for _, step, has_it in site.steps} == {(step, step >= without) for step in range(12)}
    assert {*site.texts} == {without == 0}
    assert site.made(request) == again(request, without)


def again(request: EngineRequest, without: int) -> int:
    """What a request makes that is sent again, to an engine that has the adapter."""
    site = Adapted()
    repeated = LateAdapters(most=without, least=without, are_loaded=True)
    site.scheduler.add(with_spec(request, late=repeated, patches=HAT))
    site.finish()
    assert site.told == [without]
    return site.made(request)


def test_one_that_waits_can_be_aborted_and_has_a_deadline() -> None:
    site = Adapted()
    site.scheduler.add(late(make_edit("a"), most=1))
    site.scheduler.add(late(make_edit("b", deadline=5.0), most=0))
    site.stand_still()
    site.scheduler.abort(["a"])
    site.load()
    site.load("b")
    site.finish()
    assert site.told == [0]
    assert {output.request_id for output in site.outputs} == {"a", "b"}
    waiting = Adapted()
    waiting.scheduler.add(late(make_edit("a", deadline=5.0), most=1))
    waiting.stand_still()
    waiting.now = 6.0
    waiting.finish()
    (failed,) = waiting.outputs
    assert isinstance(failed, Failed)
    assert failed.failure.kind == "deadline_exceeded"


@pytest.mark.parametrize("most", [0, 1])
def test_others_go_on_while_as_many_wait_as_may_run_together(most: int) -> None:
    """Those that wait are still shown as far as they are."""
    site, waiting = Adapted(), [f"late{number}" for number in range(8)]
    for name in waiting:
        site.scheduler.add(late(make_edit(name, steps=3, partial_images=2), most=most))
    site.stand_still()
    assert site.ended == []
    assert sum(isinstance(output, PartialImage) for output in site.outputs) == 8 * most
    for name in "abc":
        site.scheduler.add(make_edit(name))
    for _ in range(40):
        site.step()
    assert sorted(site.ended) == ["a", "b", "c"]
    for name in waiting:
        site.load(name)
    site.finish()
    assert sorted(site.ended[3:]) == waiting


def test_one_that_waits_is_shown_beside_large_ones_where_its_last_step_was_made() -> None:
    """Also once there is a plan without it."""
    site = Adapted(3)
    site.scheduler.add(late(make_edit("a", steps=2, partial_images=1), most=1))
    run_until(site, lambda: len(site.steps) == 1)
    site.scheduler.add(make_edit("b", steps=40))
    site.stand_still()
    assert "b" not in site.ended, "it has many steps left"
    assert [output.request_id for output in site.outputs if isinstance(output, PartialImage)] == ["a"]
    by_node = {item.node: batch.ranks for batch in site.batches for item in batch.items if item.request_id == "a"}
    assert by_node["preview"] == by_node["denoise"]


@pytest.mark.parametrize("slots", [2, 8])
def test_another_large_one_has_the_rank_of_one_that_waits_at_once(slots: int) -> None:
    """And its slot, if there are too few."""
    site = Adapted(2, max_num_seqs=slots)
    one, two = (
        CostSample("m", "denoise", Work.of([280] * number), float(number), is_profile=True) for number in (1, 2)
    )
    site.scheduler.learn([one, two])
    site.scheduler.add(late(make_edit("a", steps=9), most=3))
    site.scheduler.add(make_edit("b", steps=100))
    site.scheduler.add(make_edit("c", steps=100))
    site.stand_still()
    assert site.workers.steps_done("a") == 3
    assert site.workers.steps_done("b") + site.workers.steps_done("c") < 40
    assert site.workers.steps_done("c") > 0


def test_rounds_of_classes_are_no_steps() -> None:
    turn = Node("turn", "run", role="turn", region="turns")
    workflow = replace(INPAINT, nodes=(turn, *INPAINT.nodes), regions=(Region("turns", rounds=3), *INPAINT.regions))
    models = dict.fromkeys((node.name for node in workflow.nodes), "m") | {"turn": "turn"}
    rounds = {region.name: region.rounds or 4 for region in workflow.regions}
    progress = Progress(workflow, {name: int(number) for name, number in rounds.items()})
    request = Request(late(make_edit("a"), most=2), workflow, Binding(models, {}, ()), progress)
    for _ in range(3):
        request.send(turn, (0,))
    assert request.num_begun == 1
    request.send(workflow.node("denoise"), (0,))
    request.send(workflow.node("denoise"), (0,))
    assert request.num_begun == 2
    assert request.awaits_adapters(workflow.node("denoise"))
    request.use_adapters(HAT)
    assert request.patches_of(workflow.node("denoise")) == HAT
    assert request.patches_of(turn) == request.patches_of(workflow.node("text_encode")) == ()
